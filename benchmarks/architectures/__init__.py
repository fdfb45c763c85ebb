"""Which model architectures have beams that are right: `python -m benchmarks.architectures`."""
