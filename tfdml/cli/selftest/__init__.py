"""Implementation of `tfdml test`: jobs, the ranks' program, verdict and report."""
