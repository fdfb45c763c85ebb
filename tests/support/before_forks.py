"""What a process imports and finds out before it is forked: what engines and servers would do at their start."""

import atexit
import gc

import vllm.distributed.elastic_ep.elastic_execute
import vllm.entrypoints.cli.main
import vllm.entrypoints.openai.api_server
import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
import vllm.model_executor.models.llama
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.gpu.model_runner  # noqa: F401

import vllm_trie.worker.cpu.replace
import vllm_trie.worker.cpu_worker  # noqa: F401
from tests.support import forks, kernels_once  # noqa: F401
from vllm_trie.compat.fingerprint import compare_installed_vllm

compare_installed_vllm()
gc.freeze()  # nothing of this is ever garbage
atexit.register(gc.unfreeze)  # or libraries complain of leaks
