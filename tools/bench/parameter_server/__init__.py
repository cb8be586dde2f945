"""Benchmark of `ParameterServerStrategy` against a hand-written loop and Keras 2."""
