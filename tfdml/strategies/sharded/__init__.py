"""Sharded optimizer state: parts of variables, and their updates by the ranks that own them."""
