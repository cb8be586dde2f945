"""Scripts for people who work on or measure tfdml."""
