"""What keeps a job of several processes honest: heartbeats, fingerprints, and how it is started."""
