"""Estimates of the memory that training takes: `tfdml.estimate_memory`."""

from tfdml.memory.estimate import estimate_memory
from tfdml.memory.report import Choice, MemoryReport

__all__ = ["Choice", "MemoryReport", "estimate_memory"]
