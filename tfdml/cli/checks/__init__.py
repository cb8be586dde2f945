"""What `tfdml doctor` looks at: one subject a file, each check a function that returns findings."""
