"""Requests on their way into an engine: their checks, their limits, and what comes with them."""
