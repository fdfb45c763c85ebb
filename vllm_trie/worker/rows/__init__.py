"""The rows of groups in vLLM's runner: what each has, and where it is stored."""
