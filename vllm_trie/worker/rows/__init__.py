"""The rows of groups in vLLM's runner: what each holds, and where it lies."""
