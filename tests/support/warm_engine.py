"""An engine whose kernels, vLLM's and ours, are interpreted: which variants of them it comes to once it serves.

To be called in a process of `Interpreter`. There each kernel runs as on a GPU, but for attention, and launches are told
apart as Triton does there, which compiles a kernel anew for other constants, types, strides and alignments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.interpreter import InterpretedFunction

from benchmarks.common import PAIR
from benchmarks.weightless import variants_of
from tests.support.engine import TRAINED_TARGET, Engine
from vllm_trie import beam_params
from vllm_trie.worker import kernels, warm_up

MAX_TOKENS = 4
NOT_RUN = ["_apply_grammar_bitmask_kernel", "_topk_topp_kernel"]  # which the interpreter cannot; nobody reads of them
DRAFTS = {"method": "draft_model", "model": str(PAIR / "draft"), "num_speculative_tokens": 3}

Variants = defaultdict[str, set[object]]  # by kernel
told_apart = cache(variants_of)


@contextmanager
def noted(variants: Variants, runs: bool) -> Iterator[None]:
    """Within it, kernels of all modules are noted as they are launched, and run or not."""
    run = InterpretedFunction.run

    def run_noted(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        variants[f"{kernel.fn.__module__}:{kernel.fn.__name__}"].add(told_apart(kernel)(*args, **options))
        if runs and kernel.fn.__name__ not in NOT_RUN:
            run(kernel, *args, grid=grid, warmup=warmup, **options)

    with patch.object(InterpretedFunction, "run", run_noted):
        yield


def start(engine: Engine, variants: Variants) -> None:
    """What a worker on a GPU does before it serves. Nobody reads what our kernels write then."""
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    worker = engine.core.model_executor.driver_worker.worker
    with patch.object(warm_up, "_layers", lambda _: ()), noted(variants, runs=False):
        warm_up.warm_up(engine.runner)
    with patch.object(torch.accelerator, "synchronize"), noted(variants, runs=True):
        warmup_kernels(engine.runner, worker.execute_model, worker.sample_tokens)


def serve(engine: Engine) -> Iterator[str]:
    """Each kind of request; yields what was served."""
    from vllm import SamplingParams

    ordinary = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, ignore_eos=True)
    plain, drafting = (
        beam_params(3, max_tokens=MAX_TOKENS, ignore_eos=True, speculation=speculation)
        for speculation in ("off", "exact")
    )
    controlled = beam_params(2, max_tokens=MAX_TOKENS, ignore_eos=True, repetition_penalty=1.2, logprobs=2)
    jobs = {"ordinary": ordinary, "plain": plain, "drafting": drafting, "controlled": controlled}
    for number, (name, params) in enumerate(jobs.items()):
        engine.generate([[*range(5, 25 + 9 * number)]], params)
        yield name
    engine.generate([[*range(7, 20)]] * 3, [ordinary, plain, drafting])
    yield "beside each other"


def new_variants() -> dict[str, list[str]]:
    """Kernels that an engine with a draft model would compile while it serves, by what it serves."""
    few = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 128}
    warmed, new = Variants(set), dict[str, list[str]]()
    with patch.object(kernels, "run_on", lambda _: True):
        engine = Engine(TRAINED_TARGET, speculative_config=DRAFTS, additional_config={"trie_beam": {}}, **few)
        start(engine, warmed)
        served = Variants(set)
        with noted(served, runs=True):
            for name in serve(engine):
                new[name] = [kernel for kernel, variants in served.items() if variants - warmed[kernel]]
                served.clear()
        engine.close()
    return new
