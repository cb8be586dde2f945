"""The `tfdml` command: one subcommand a file."""
