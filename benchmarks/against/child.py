"""One side of `benchmarks.against`: an engine, or the trie paper's algorithm, that runs cases as they are sent.

Runs as a file in a process of its own, with the checkout to measure first on PYTHONPATH. Its argument, the lines that
it reads and those that it writes are JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Batches = list[list[list[int]]]  # of prompts, one after the other
Run = Callable[[Batches, dict[str, Any]], dict[str, Any]]
Marks = list[tuple[float, float]]  # what `clocks` returned, at one time after the other
UNEVEN_STEPS = 3  # of the prompts, and the first ones after them


def main() -> None:
    model, options, computes = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed is no answer
    run = published_trie_search(model) if options is None else engine(model, options, computes)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(*json.loads(line))), file=answers, flush=True)


def clocks() -> tuple[float, float]:
    """Seconds on the wall, and of this process on processors."""
    return time.perf_counter(), time.process_time()


def mean_seconds(marks: Marks) -> dict[str, float] | None:
    """By clock, from one mark to the next."""
    if len(marks) < 2:
        return None
    wall, cpu = ((last - first) / (len(marks) - 1) for first, last in zip(marks[0], marks[-1], strict=True))
    return {"wall": wall, "cpu": cpu}


def engine(model: str, options: dict[str, Any], computes: bool) -> Run:
    """What runs a case on vLLM, by a model that computes or `answers_at_once`."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_trie import beam_params

    llm = LLM(model, **options)
    if not computes:
        answer_at_once(llm)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    steps = Marks()

    def marked_schedule(*args: Any, **kwargs: Any) -> Any:
        mark = clocks()
        scheduled = type(scheduler).schedule(scheduler, *args, **kwargs)  # whose class changes as groups come and go
        if scheduled.total_num_scheduled_tokens:
            steps.append(mark)
        return scheduled

    scheduler.schedule = marked_schedule

    def run(batches: Batches, options: dict[str, Any]) -> dict[str, Any]:
        if "structured_outputs" in options:
            options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
        params = (beam_params if "beam_width" in options else SamplingParams)(**options)
        as_dicts = [[{"prompt_token_ids": prompt} for prompt in batch] for batch in batches]
        llm.reset_prefix_cache()
        steps.clear()
        begin = clocks()
        outputs = [output for batch in as_dicts for output in llm.generate(batch, params, use_tqdm=False)]
        return {
            "whole": mean_seconds([begin, clocks()]),
            "step": mean_seconds(steps[UNEVEN_STEPS:]),
            "answers": [list(output.outputs[0].token_ids) for output in outputs],
            "counts": [(output.kv_transfer_params or {}).get("trie_beam") for output in outputs],
        }

    return run


def answer_at_once(llm: Any) -> None:
    """Let the model of an engine compute nothing: what a step takes then is the host's part, and selection."""
    import torch

    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    config, rows = llm.llm_engine.model_config, llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    hidden = torch.zeros(rows, config.get_hidden_size(), dtype=config.dtype)
    logits = torch.randn(rows, config.get_vocab_size(), dtype=config.dtype, generator=torch.Generator().manual_seed(0))
    model.forward = lambda input_ids, positions, *_, **__: hidden[: positions.shape[-1]]
    model.compute_logits = lambda of_rows, *_, **__: logits[: len(of_rows)]


def published_trie_search(model: str) -> Run:
    """What runs a case in transformers, one prompt after the other."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.peers.tridecode import PublishedTrieSearch

    peer = PublishedTrieSearch(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())

    def run(batches: Batches, options: dict[str, Any]) -> dict[str, Any]:
        width, num_tokens = options["beam_width"], options["max_tokens"]
        begin = clocks()
        found = [peer.search(prompt, width, num_tokens, None) for batch in batches for prompt in batch]
        return {"whole": mean_seconds([begin, clocks()]), "answers": [one.tokens for one in found]}

    return run


if __name__ == "__main__":
    main()
