"""The worker's side: one beam group is b rows of the batch."""
