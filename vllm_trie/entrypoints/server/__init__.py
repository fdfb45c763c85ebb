"""Beams in vLLM's server: its endpoints, streams and metrics."""
