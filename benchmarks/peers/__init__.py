"""Other beam searches, to measure against."""
