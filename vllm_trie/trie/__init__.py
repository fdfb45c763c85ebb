"""The host's truth about a search, as two tries: tokens of hypotheses, and blocks of KV cache."""
