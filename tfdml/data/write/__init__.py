"""Writing of TFRecord shards from any source, without TensorFlow."""
