"""Recording of the first train steps for `tfdml verify`; see `hooks`."""
