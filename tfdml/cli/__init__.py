"""The `tfdml` command; each subcommand has its own module."""
