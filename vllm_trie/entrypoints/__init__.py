"""The front end: checks requests before an engine sees them, and turns the engine's answers into vLLM's outputs."""
