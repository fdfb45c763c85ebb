"""Engines on a GPU, beside sampling and beside what peers publish."""
