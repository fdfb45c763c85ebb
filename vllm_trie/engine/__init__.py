"""The scheduler's side: one beam group is one request."""
