"""Search for the largest batch that fits in memory: `tfdml.find_batch_size`."""

from tfdml.batch_size.find import find_batch_size

__all__ = ["find_batch_size"]
