"""The worker's side: each beam group is b rows of the batch."""
