"""Runner of Keras's own tests in the scope of a strategy: `tools/keras_suite`."""
