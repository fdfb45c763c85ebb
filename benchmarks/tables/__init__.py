"""One file per table."""
