"""Scripts for developing and measuring tfdml."""
