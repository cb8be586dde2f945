"""`ParameterServerStrategy` beside a hand-written loop and Keras 2."""
