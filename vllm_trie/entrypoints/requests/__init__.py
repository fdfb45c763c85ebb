"""Checks requests before they reach an engine, and reads the items and phrases that come with them."""
