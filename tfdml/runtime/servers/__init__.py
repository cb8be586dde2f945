"""Processes of a parameter-server cluster that serve: workers and servers."""
