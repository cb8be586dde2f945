"""Cluster of parameter servers: connection, checks, and placement of variables."""
