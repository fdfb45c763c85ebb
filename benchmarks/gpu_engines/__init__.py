"""Engines on a GPU, compared with sampling and with what peers publish."""

import os

# Before vLLM and transformers are imported: they ask for nothing on a network, and report nothing.
for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"):
    os.environ.setdefault(name, "1")
# Models are made here by torch, whose threads a forked engine would wait for without end.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
