"""Tests of the plugin. Here is what must be set before anything imports vLLM, torch or Triton."""

import os
import runpy
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # tests look into the engine
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes test at a time, and the models are tiny
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch  # reads some of these

# The engine tests run on the runner that this environment variable, which is vLLM's own, asks for.
RUNS_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
if RUNS_V2 and not torch.cuda.is_available():
    runpy.run_path(str(Path(__file__).with_name("triton_on_cpu") / "sitecustomize.py"))
