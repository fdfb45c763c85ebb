"""An engine whose kernels, vLLM's and ours, are interpreted: what it finds, and which variants of them it comes to.

`served` is to be called in a process of `Interpreter`. There kernels do the work as on a GPU, but for attention, and
launches are distinguished as by Triton, which compiles a kernel anew for other constants, types, strides and
alignments.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from pkgutil import walk_packages
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from triton.runtime.interpreter import InterpretedFunction

from benchmarks.weightless import variants_of
from tests.support.engine import TRAINED_TARGET, Engine
from tests.support.pairs import TRAINED, drafting
from tests.support.running import trained_prompts
from tests.support.taken_again import TakenAgain, copies_made
from tests.support.trained_pair import Answer, answer
from vllm_trie import beam_params, search
from vllm_trie.worker import launches
from vllm_trie.worker.select.selection_graphs import SelectionGraphs
from vllm_trie.worker.startup import warm_up

MAX_TOKENS = 5
NOT_RUN = ["_apply_grammar_bitmask_kernel", "_topk_topp_kernel"]  # which the interpreter cannot; nobody reads of them

Variants = defaultdict[str, set[object]]  # by kernel
cached_variants = cache(variants_of)


@contextmanager
def noted(variants: Variants, runs: bool) -> Iterator[None]:
    """Within it, kernels of all modules are noted as they are launched, and run or not."""
    run = InterpretedFunction.run

    def run_noted(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        variants[f"{kernel.fn.__module__}:{kernel.fn.__name__}"].add(cached_variants(kernel)(*args, **options))
        if runs and kernel.fn.__name__ not in NOT_RUN:
            run(kernel, *args, grid=grid, warmup=warmup, **options)

    with patch.object(InterpretedFunction, "run", run_noted):
        yield


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Within it, kernels do the work, and the host does not look at what the device has."""
    import_module("vllm_trie.worker.cpu_worker")  # so that all are there that are patched
    for module in walk_packages(search.__path__, f"{search.__name__}."):
        import_module(module.name)

    with ExitStack() as stack:
        stack.enter_context(patch.object(launches, "worker_runs_kernels_on", lambda _: True))
        for name, module in sorted(sys.modules.items()):
            if name.startswith("vllm_trie.") and hasattr(module, "is_searched_on_host"):
                stack.enter_context(patch.object(module, "is_searched_on_host", lambda _: False))
        yield


def start(engine: Engine, variants: Variants) -> None:
    """What a worker on a GPU does before it serves. Nobody reads what our kernels write then."""
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    worker = engine.core.model_executor.driver_worker.worker
    with patch.object(warm_up, "_layers_at_startup", lambda _: ()), noted(variants, runs=False):
        warm_up.warm_up_at_startup(engine.runner)
        engine.runner.speculation.warm_up_stock()
    with patch.object(torch.accelerator, "synchronize"), noted(variants, runs=True):
        warmup_kernels(engine.runner, worker.execute_model, worker.sample_tokens)


def jobs() -> dict[str, list[Any]]:
    """By name, requests that are served together: ordinary ones, and beams of several kinds."""
    from vllm import SamplingParams

    ordinary = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, ignore_eos=True)
    plain, drafting = (
        beam_params(3, n=3, max_tokens=MAX_TOKENS, ignore_eos=True, speculation=speculation)
        for speculation in ("off", "exact")
    )
    controlled = beam_params(2, n=2, max_tokens=MAX_TOKENS, ignore_eos=True, repetition_penalty=1.2, logprobs=2)
    alone = {"ordinary": [ordinary], "plain": [plain], "drafting": [drafting], "controlled": [controlled]}
    return {**alone, "in one batch": [ordinary, plain, drafting]}


def serve(engine: Engine) -> Iterator[tuple[str, list[Answer]]]:
    """What comes of each of `jobs`: the hypotheses of those that are searches."""
    for number, (name, params) in enumerate(jobs().items()):
        prompts = trained_prompts([20 * (1 + number)] * len(params))
        outputs = engine.generate(prompts, params)
        yield name, [answer(output) for output, asked in zip(outputs, params, strict=True) if asked.n > 1]


def start_pair(make: Callable[..., Engine]) -> Engine:
    """An engine with a draft model, as `make` makes them."""
    few = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 128}
    return make(TRAINED_TARGET, **drafting(TRAINED[1], 3), additional_config={"trie_beam": {}}, **few)


class Served(NamedTuple):
    """What came of `jobs`.

    Args:
        launched: Kernels, by job.
        new: Those of them that would have been compiled for it.
        found: What it finds.
        num_graphs: How many graphs there are.
    """

    launched: dict[str, list[str]]
    new: dict[str, list[str]]
    found: dict[str, list[Answer]]
    num_graphs: int


def served() -> Served:
    """Serve `jobs` by kernels, and by what stands in for CUDA graphs."""
    warmed, variants, graphs = Variants(set), Variants(set), TakenAgain()
    launched, new, found = dict[str, list[str]](), dict[str, list[str]](), dict[str, list[Answer]]()
    with as_on_a_gpu():
        engine = start_pair(Engine)
        runner = engine.runner
        runner.selector.use(SelectionGraphs(runner.rows, runner.dtype, graphs, 1 << 20))
        start(engine, warmed)
        with noted(variants, runs=True), copies_made():
            for name, answers in serve(engine):
                launched[name] = [kernel.rpartition(":")[2] for kernel in variants]
                new[name] = [kernel for kernel, of_kernel in variants.items() if of_kernel - warmed[kernel]]
                found[name] = answers
                variants.clear()
        engine.close()
    return Served(launched, new, found, graphs.count)
