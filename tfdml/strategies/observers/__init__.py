"""Observers of steps: what a step measures or votes on, for a session's callbacks."""
