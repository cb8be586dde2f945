"""Trial of local updates: what fewer synchronizations cost in accuracy."""
