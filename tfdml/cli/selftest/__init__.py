"""`tfdml test`: the runs it compares, the program of their ranks, the verdict, and its report."""
