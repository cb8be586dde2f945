"""What records can be converted from: one kind of input a file."""
