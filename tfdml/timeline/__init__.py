"""Timelines of a job's ranks: their files, the alignment of their clocks, and what they tell."""
