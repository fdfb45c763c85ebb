"""Answers on their way out of an engine: one answer of a search becomes outputs of vLLM's."""
