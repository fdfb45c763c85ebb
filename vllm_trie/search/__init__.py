"""The rules of the search: numpy and torch only, nothing of vLLM."""
