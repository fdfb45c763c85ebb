"""Thousands of steps of whatever users do: everything holds after every step, and every answer is right in the end."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.conftest import Engine, Engines
from tests.engine.pairs import NOISE
from tests.engine.running import BYTES_PER_BLOCK, prompt_of
from tests.reference import Answer, agree, engine_answers, transformers_beams
from vllm_trie import beam_params

STEPS = int(os.environ.get("WORKLOAD_STEPS", 600))
MOST_WAITING = 10
MOST_TIES = 0.02


class Job(NamedTuple):
    """A request, and what transformers answers."""

    prompt: list[int]
    params: SamplingParams
    answers: list[Answer]


@cache
def jobs_of(model: Path, seed: str) -> list[Job]:
    shared, choose = prompt_of(70, 1), random.Random(seed)
    jobs = []
    for number in range(24):
        width, max_tokens = choose.choice([0, 0, 1, 2, 3, 5, 8, 12]), choose.randint(1, 50)
        prompt = shared[: choose.choice([0, 20, 64, 70])] + prompt_of(choose.randint(1, 60), number)
        stops = choose.random() < 0.5
        if width == 0:
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=not stops, logprobs=0)
        else:
            params = beam_params(width, n=choose.randint(1, width), max_tokens=max_tokens, ignore_eos=not stops)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        eos = 1 if stops else None
        answers = transformers_beams(model, prompt, max(width, 1), params.n, max_tokens, eos_token_id=eos)
        jobs.append(Job(prompt, params, answers))
    return jobs


class Workload:
    """One engine, and what its users have asked of it so far."""

    def __init__(self, engine: Engine, jobs: list[Job], choose: random.Random) -> None:
        self.engine, self.jobs, self.choose = engine, jobs, choose
        self.core = engine.llm.llm_engine
        self.running: dict[str, Job] = {}
        self.counts = dict.fromkeys(("asked", "aborted", "preempted", "reset", "answered", "tied", "speculated"), 0)

    def ask(self) -> None:
        job, name = self.choose.choice(self.jobs), str(self.counts["asked"])
        self.core.add_request(
            name, {"prompt_token_ids": job.prompt}, job.params.clone(), priority=self.choose.randrange(3)
        )
        self.running[name] = job
        self.counts["asked"] += 1

    def abort(self) -> None:
        name = self.choose.choice([*self.running])
        self.core.abort_request([name])
        del self.running[name]
        self.counts["aborted"] += 1

    def preempt(self) -> None:
        """As many of those that came last as blocks may be short of."""
        running = self.engine.scheduler.running
        for _ in range(self.choose.randint(1, len(running)) if running else 0):
            self.engine.scheduler._preempt_request(running.pop(), time.monotonic())
            self.counts["preempted"] += 1

    def reset(self) -> None:
        assert self.core.reset_prefix_cache(reset_running_requests=True)
        self.counts["reset"] += 1

    def step(self) -> None:
        for output in self.core.step():
            job = self.running.pop(output.request_id)
            same = agree(engine_answers(output, 1.0), job.answers)
            self.counts["answered"] += 1
            self.counts["tied"] += not same
            if output.kv_transfer_params is not None:
                self.counts["speculated"] += output.kv_transfer_params["trie_beam"]["steps_per_forward"] > 1.5

    def act(self) -> None:
        if len(self.running) < MOST_WAITING and self.choose.random() < 0.3:
            self.ask()
        if self.running and self.choose.random() < 0.01:
            self.abort()
        if self.choose.random() < 0.03:
            self.preempt()
        if self.choose.random() < 0.01:
            self.reset()
        self.step()


@pytest.mark.parametrize(
    ("kind", "policy", "speculates", "is_async"),
    [
        ("gqa", "fcfs", False, True),
        ("gqa", "priority", False, False),
        ("gemma2", "fcfs", False, True),
        ("gqa", "priority", True, True),
        ("gemma2", "fcfs", True, False),
    ],
)
def test_a_random_workload_ends_with_every_answer_right(
    engines: Engines,
    random_pair: Callable[[str, float], tuple[Path, Path]],
    kind: str,
    policy: str,
    speculates: bool,
    is_async: bool,
) -> None:
    (model, draft), choose = random_pair(kind, NOISE), random.Random(policy)
    jobs = jobs_of(model, policy)
    options: dict[str, Any] = {
        "async_scheduling": is_async,
        "max_num_seqs": 20,
        "max_num_batched_tokens": 96,
        "scheduling_policy": policy,
    }
    num_blocks = {"gqa": 34, "gemma2": 60}[kind]  # two KV cache groups take blocks each
    if speculates:
        num_blocks *= 2  # which have layers of both models
        options["speculative_config"] = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    engine = engines(model, kv_cache_memory_bytes=num_blocks * BYTES_PER_BLOCK, **options)
    workload = Workload(engine, jobs, choose)
    engine.watched.restart()
    for _ in range(STEPS):
        workload.act()
    steps_left = 100 * MOST_WAITING
    while workload.core.has_unfinished_requests():
        workload.step()
        steps_left -= 1
        assert steps_left, f"these never end: {[*workload.running]}"
    counts = workload.counts
    assert not workload.running
    assert engine.watched.num_compared > STEPS
    assert engine.watched.most_pending == 1 + (is_async and not speculates)
    assert counts["answered"] == counts["asked"] - counts["aborted"]
    assert min(counts["aborted"], counts["preempted"], counts["reset"]) > 0
    assert counts["answered"] > STEPS // 30
    assert (counts["speculated"] > STEPS // 100) == speculates
    assert counts["tied"] <= MOST_TIES * counts["answered"]
