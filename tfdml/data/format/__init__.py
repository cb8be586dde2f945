"""Format of the shards on disk: records, index, manifest, schema and storage."""
