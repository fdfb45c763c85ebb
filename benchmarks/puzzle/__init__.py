"""A puzzle for searches by steps, with a model that solves some of it, and one that values partial answers."""

from pathlib import Path

TARGET, VALUE = (Path(__file__).parent / role for role in ("target", "value"))
