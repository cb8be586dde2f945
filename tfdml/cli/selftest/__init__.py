"""Implementation of `tfdml test`: jobs, the ranks' program, comparison and report."""
