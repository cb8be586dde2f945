"""Input of a step: global batches, the rows of each replica, and checks of what ranks read."""
