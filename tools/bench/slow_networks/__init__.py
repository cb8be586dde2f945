"""Local updates on slow networks, against their peers."""
