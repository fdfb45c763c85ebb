"""vLLM's server: its endpoints, its command line, its streams and metrics."""
