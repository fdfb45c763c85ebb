"""Engines on a GPU, compared with sampling and with what peers publish."""
