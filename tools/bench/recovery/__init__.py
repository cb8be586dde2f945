"""The loss of a rank, until the others train on."""
