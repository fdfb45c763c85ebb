"""Engines on a GPU, compared with sampling and with what peers publish."""

import os

# Before vLLM and transformers are imported: they ask for nothing on a network, and report nothing.
os.environ["HF_HUB_OFFLINE"] = os.environ["VLLM_NO_USAGE_STATS"] = "1"
