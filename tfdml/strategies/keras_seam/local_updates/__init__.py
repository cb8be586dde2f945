"""Training with local updates: rounds of local steps, and the synchronizations between them."""
