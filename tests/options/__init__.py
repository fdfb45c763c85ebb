"""Options, each by itself, and together."""
