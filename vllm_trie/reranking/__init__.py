"""Returns hypotheses in another order than the search's, offline and in batch jobs: the option `rerank`."""
