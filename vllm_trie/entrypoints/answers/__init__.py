"""Turns the single answer of a search, as the engine sends it, into vLLM's outputs."""
