"""Batch jobs: search a file of prompts with engines on Ray, and write the hypotheses to another file."""
