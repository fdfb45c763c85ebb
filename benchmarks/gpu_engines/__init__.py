"""Engines on a GPU, compared with sampling and with what peers publish."""

import os

# Before vLLM and transformers are imported: they ask for nothing on a network, and report nothing.
for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"):
    os.environ.setdefault(name, "1")
