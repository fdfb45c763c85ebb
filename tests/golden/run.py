"""Runs a batch of requests in an engine of this process, and keeps what they decide and answer."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.golden import model
from tests.golden.batches import Batch, Request
from tests.golden.decisions import Record, Steps
from tests.golden.tap import Tap
from tests.support.engine import Engine
from vllm_trie import beam_params
from vllm_trie.catalog import Catalog
from vllm_trie.options import PLUGIN_NAME

COUNTS_OF_DRAFTS = ("steps", "forwards", "drafted", "accepted", "beams", "steps_per_forward", "mean_width")
ARRIVALS = 2  # requests before each step of the engine
MOST_TOGETHER = 40  # requests
NOISE = 4e-5  # of logits, far above what processors round differently


class Unwatched(Engine):
    """An engine whose rows are not compared after each step: what they decide is."""

    def watch(self) -> None:
        """See `Engine`."""


def run(batch: Batch, folder: Path, looks_for_firm: bool) -> Record:
    """Everything in a batch.

    Args:
        batch: The requests and their engine.
        folder: For models and catalogs.
        looks_for_firm: Run it twice more, with disturbed logits.
    """
    target, draft = model.make(folder / "target", batch.unit), model.make(folder / "draft", drift=batch.drift)
    for name, items in batch.catalogs.items():
        Catalog.from_sequences(items).save(folder / f"{name}.catalog")
    engine = Unwatched(target, load_format="dummy", **batch.engine_options(folder, draft))
    try:
        steps, answers = ask(engine, batch.requests)
        checksum = engine.runner.model.checksum()
        firm = [*steps] if looks_for_firm else []
        for noise in (NOISE, -NOISE) if looks_for_firm else ():
            engine.runner.model.disturb(noise)
            others, _ = ask(engine, batch.requests)
            firm = [name for name in firm if are_alike(steps[name], others[name])]
        engine.check_nothing_is_left()
    finally:
        engine.close()
    return Record(steps, answers, firm, checksum)


def are_alike(steps: Steps, others: Steps) -> bool:
    """Whether the same is decided, whatever its scores."""
    return steps.keys() == others.keys() and all(
        np.array_equal(one[:2], other[:2])
        for number in steps
        for one, other in zip(steps[number], others[number], strict=True)
    )


def ask(engine: Engine, requests: dict[str, Request]) -> tuple[dict[str, Steps], dict[str, list[Any]]]:
    """Ask for a few more before each step of the engine, until all is over. Returns decisions and answers."""
    core, waiting, running = engine.llm.llm_engine, deque(requests), set[str]()
    answers: dict[str, list[Any]] = {name: [] for name in requests}
    engine.llm.reset_prefix_cache()
    gone = list[str]()

    def after_step(name: str, count: int) -> None:
        if count == requests[name].aborted_after:
            gone.append(name)

    tap = Tap(engine, after_step)
    with tap.listening():
        while waiting or core.has_unfinished_requests():
            for _ in range(min(ARRIVALS, MOST_TOGETHER - len(running), len(waiting))):
                name = waiting.popleft()
                core.add_request(name, {"prompt_token_ids": requests[name].prompt}, params_of(requests[name].options))
                running.add(name)
            together: dict[str, dict[str, Any]] = {}
            for output in core.step():
                join(together, output.request_id, as_json(output))
                running -= {output.request_id} if output.finished else set()
            for name, answer in together.items():
                answers[name].append(answer)
            core.abort_request([*gone])
            running -= {*gone}
            gone.clear()
    return {name: tap.steps[name] for name in requests if name in tap.steps}, answers


def join(together: dict[str, dict[str, Any]], name: str, answer: dict[str, Any]) -> None:
    """Take outputs of one request that come in one step for one, as servers do."""
    before = together.get(name, {"outputs": []})
    together[name] = {**answer, "outputs": before["outputs"] + answer["outputs"]}


def params_of(options: dict[str, Any]) -> SamplingParams:
    """Of a search, or of an ordinary request."""
    options = {"output_kind": RequestOutputKind.FINAL_ONLY} | options
    searches = options.keys() & {"beam_width", "beam_widths"}
    return beam_params(**options) if searches else SamplingParams(**options)


def as_json(output: Any) -> dict[str, Any]:
    """What a request returns, floats to the bit, without what depends on how long anything took."""
    answer = (output.kv_transfer_params or {}).get(PLUGIN_NAME, {})
    of_search = {name: value for name, value in answer.items() if name not in COUNTS_OF_DRAFTS}
    outputs = [
        {
            "index": one.index,
            "tokens": [*one.token_ids],
            "text": one.text,
            "logprob": one.cumulative_logprob,
            "finish": one.finish_reason,
            "stop": one.stop_reason,
            "logprobs": [
                [[token, entry.logprob, entry.rank, entry.decoded_token] for token, entry in place.items()]
                for place in one.logprobs or ()
            ],
        }
        for one in output.outputs
    ]
    return json.loads(json.dumps({"outputs": outputs, "search": of_search, "finished": output.finished}))
