"""Keras's own tests, run in the scope of a strategy: `tools/keras_suite`."""
