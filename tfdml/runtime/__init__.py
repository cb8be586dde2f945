"""Runtime of a multi-process job: launcher, heartbeats and call fingerprints."""
