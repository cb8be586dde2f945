"""Reading of TFRecord shards: the order of records, batches, and the `tf.data` pipeline."""
