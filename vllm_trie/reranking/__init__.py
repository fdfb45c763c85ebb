"""Hypotheses that come back in another order than the search has them: offline, and in batch jobs."""
