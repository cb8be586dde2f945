"""Memory of a traced graph's tensors: their bytes, how long they live, traces that never run."""
