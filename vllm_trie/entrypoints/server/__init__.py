"""vLLM's server: its endpoints, its streams and its metrics."""
