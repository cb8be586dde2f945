"""Times at which a rank's steps, exchanges, callbacks and saves begin and end."""
