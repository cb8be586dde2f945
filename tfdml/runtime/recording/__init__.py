"""Recording of when a rank's steps, exchanges, callbacks and saves begin and end."""
