"""Steps of replicas: TensorFlow's extended object, the global step, state equal on all ranks."""
