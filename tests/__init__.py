"""Tests of the plugin. Here is what must be set before anything imports vLLM, torch or Triton."""

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # tests look into the engine
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_TRIE_CHECK", "strict")  # also in the processes that tests start
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes test at a time, and the models are tiny
os.environ.setdefault("RAY_worker_niceness", "0")  # beside busy neighbours Ray's actors would hardly run
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # eager engines would still compile the log-probabilities' kernel

import torch  # reads some of these

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # for our own kernels; vLLM's it leaves without Triton, which has no CPU driver
    )
