"""Guard between the ranks: heartbeats, activities, fingerprints and the verdict on a failure."""
