"""Attention that reads the KV blocks that all rows of a group share once for all of them."""
