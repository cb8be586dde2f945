"""Hang report: what each rank has exchanged, where its threads are, and which rank departs."""
