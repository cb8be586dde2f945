"""Memory of a traced graph's tensors: their bytes, and how long they live."""
