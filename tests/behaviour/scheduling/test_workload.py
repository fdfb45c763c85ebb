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

from tests.support.engine import TRAINED_TARGET, Engine, Engines
from tests.support.grammars import may_come, structured
from tests.support.group_loop import loop_group_beams
from tests.support.items import EOS, Item, along, random_items
from tests.support.loop import loop_beams
from tests.support.pairs import NOISE, TRAINED, drafting, looking_up
from tests.support.reference import Answer, agree, engine_answers, transformers_beams
from tests.support.running import BYTES_PER_BLOCK, prompt_of
from vllm_trie import beam_params, hypotheses
from vllm_trie.messages import NO_HYPOTHESIS

pytestmark = pytest.mark.slow

STEPS = int(os.environ.get("WORKLOAD_STEPS", 300))
MOST_WAITING = 10
MOST_TIES = 0.02
ITEMS = random_items(2000, [3, 4, 6])
IMPOSSIBLE = -1e6  # scores of what transformers fills its answers with


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
        kinds = ["", "compact", "widths", "catalog", "grammar" if model == TRAINED_TARGET else "", "ngrams", "groups"]
        kind = kinds[number % len(kinds)] if width > 0 else ""
        if kind == "widths":
            jobs.append(of_several_widths(model, prompt, [choose.randint(1, width), width, choose.randint(1, width)]))
            continue
        if kind == "groups":
            items = ITEMS if number % 2 else None
            jobs.append(in_groups(model, prompt, 2 * choose.randint(1, 3), choose.choice([2, 1]), items))
            continue
        if kind in ("catalog", "grammar"):
            jobs.append(constrained(model, kind, prompt, width + 1, choose.randint(1, width)))
            continue
        if width == 0:
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=not stops, logprobs=0)
        else:
            returned = {"compact": True} if kind == "compact" else {"n": choose.randint(1, width)}
            params = beam_params(width, max_tokens=max_tokens, ignore_eos=not stops, **returned)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        eos, n, more = 1 if stops else None, width if kind == "compact" else params.n, {}
        if kind == "ngrams" and width > 1:  # one beam's score transformers computes among what is left
            more["no_repeat_ngram_size"] = params.extra_args["no_repeat_ngram_size"] = choose.choice([1, 2, 3])
        answers = transformers_beams(model, prompt, max(width, 1), n, max_tokens, eos_token_id=eos, **more)
        jobs.append(Job(prompt, params, answers))
    return jobs


def of_several_widths(model: Path, prompt: list[int], widths: list[int]) -> Job:
    """A search that is not equally wide in every step."""
    width = max(widths)
    params = beam_params(beam_widths=widths, n=width, max_tokens=9)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return Job(prompt, params, [*loop_beams(model, prompt, width, width, 9, eos=EOS, widths=widths)])


def in_groups(model: Path, prompt: list[int], width: int, size: int, items: list[Item] | None) -> Job:
    """Group beam search, in groups of `size` beams, or of one; along items, if there are any."""
    num_groups = width // size if width > size else width
    options: dict[str, Any] = {"num_beam_groups": num_groups, "diversity_penalty": 0.7, "max_tokens": 9}
    if items is not None:
        options |= {"catalog_stop": True, "allowed_sequences": [[*item] for item in items]}
    params = beam_params(width, n=width, **options)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return Job(prompt, params, loop_group_beams(model, prompt, width, num_groups, 0.7, 9, items=items))


def constrained(model: Path, kind: str, prompt: list[int], width: int, n: int) -> Job:
    """A search along a catalog, or under a grammar. One beam's score transformers computes among what is allowed."""
    ours: dict[str, Any] = {"catalog_stop": True, "allowed_sequences": [[*item] for item in ITEMS]}
    theirs: dict[str, Any] = {"prefix_allowed_tokens_fn": along(ITEMS, prompt)}
    if kind == "grammar":
        ours = {"structured_outputs": structured("regex")}

        def allowed(_: int, tokens: Any) -> list[int]:
            return may_come("regex", tuple(tokens[len(prompt) :].tolist())) or [EOS]

        theirs = {"prefix_allowed_tokens_fn": allowed, "renormalize_logits": True}
    params = beam_params(width, n=n, max_tokens=9, **ours)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return Job(prompt, params, transformers_beams(model, prompt, width, n, 9, **theirs))


class Workload:
    """One engine, and what its users have asked of it so far."""

    def __init__(self, engine: Engine, jobs: list[Job], choose: random.Random, drafts: bool) -> None:
        self.engine, self.jobs, self.choose, self.drafts = engine, jobs, choose, drafts
        self.core = engine.llm.llm_engine
        self.running: dict[str, Job] = {}
        self.counts = dict.fromkeys(("asked", "aborted", "preempted", "reset", "answered", "tied", "speculated"), 0)
        self.counts |= {"along": 0, "under a grammar": 0, "compact": 0}

    def ask(self) -> None:
        job, name = self.choose.choice(self.jobs), str(self.counts["asked"])
        params = job.params.clone()
        if self.drafts and params.extra_args and self.choose.random() < 0.5:  # others speculate as far as it pays
            params.extra_args["speculation"] = "exact"
        self.core.add_request(name, {"prompt_token_ids": job.prompt}, params, priority=self.choose.randrange(3))
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
            output.outputs = [hypothesis for hypothesis in output.outputs if hypothesis.stop_reason != NO_HYPOTHESIS]
            possible = [answer for answer in job.answers if answer.score > IMPOSSIBLE]
            ours = engine_answers(output, 1.0)
            if job.params.extra_args and "compact" in job.params.extra_args:
                found = hypotheses(output)
                rows = zip(found.token_ids.tolist(), found.lengths.tolist(), found.scores.tolist(), strict=True)
                ours = [Answer(tokens[:length], score) for tokens, length, score in rows]
                self.counts["compact"] += 1
            same = agree(ours, possible)
            extra_args = job.params.extra_args or {}
            self.counts["along"] += "allowed_sequences" in extra_args
            self.counts["under a grammar"] += job.params.structured_outputs is not None
            self.counts["answered"] += 1
            self.counts["tied"] += not same
            if output.kv_transfer_params is not None:
                self.counts["speculated"] += output.kv_transfer_params["trie_beam"].get("steps_per_forward", 0) > 1.5

    def act(self) -> None:
        if len(self.running) < MOST_WAITING and self.choose.random() < 0.3:
            self.ask()
        if self.running and self.choose.random() < 0.02:
            self.abort()
        if self.choose.random() < 0.06:
            self.preempt()
        if self.choose.random() < 0.02:
            self.reset()
        self.step()


@pytest.mark.parametrize(
    ("kind", "policy", "drafts", "is_async"),
    [
        pytest.param("gqa", "fcfs", None, True, marks=pytest.mark.nightly),
        pytest.param("gqa", "priority", None, False, marks=pytest.mark.nightly),
        pytest.param("gemma2", "fcfs", None, True, marks=pytest.mark.nightly),
        ("gqa", "priority", "model", True),
        pytest.param("gemma2", "fcfs", "model", False, marks=pytest.mark.nightly),
        pytest.param("gemma2", "priority", "ngram", False, marks=pytest.mark.nightly),
        pytest.param("gemma2", "fcfs", "ngram_gpu", True, marks=pytest.mark.nightly),
        pytest.param("trained", "fcfs", None, True, marks=pytest.mark.nightly),
        pytest.param("granite4", "fcfs", None, True, marks=pytest.mark.nightly),
        pytest.param("falcon_h1", "priority", None, False, marks=pytest.mark.nightly),
    ],
)
def test_a_random_workload_ends_with_every_answer_right(
    engines: Engines,
    random_pair: Callable[[str, float], tuple[Path, Path]],
    kind: str,
    policy: str,
    drafts: str | None,
    is_async: bool,
) -> None:
    (model, draft), choose = TRAINED if kind == "trained" else random_pair(kind, NOISE), random.Random(policy)
    jobs = jobs_of(model, policy)
    shared = "on" if kind in ("gqa", "trained") else "auto"  # others have attention that no kernel of ours computes
    options: dict[str, Any] = {
        "async_scheduling": is_async,
        "max_num_seqs": 20,
        "max_num_batched_tokens": 96,
        "scheduling_policy": policy,
        "additional_config": {"trie_beam": {"check_invariants": True, "shared_prefix_attention": shared}},
    }
    # gemma2 has two KV cache groups; trained seven layers; the last two pages that hold a state
    num_blocks = {"gqa": 34, "gemma2": 60, "trained": 119, "granite4": 110, "falcon_h1": 50}[kind]
    if drafts == "model":
        num_blocks *= 2  # which have layers of both models
        options |= drafting(draft, 3)
    elif drafts is not None:
        options |= looking_up(3, method=drafts)
    engine = engines(model, kv_cache_memory_bytes=num_blocks * BYTES_PER_BLOCK, **options)
    workload = Workload(engine, jobs, choose, drafts is not None)
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
    assert engine.watched.most_pending == 1 + is_async  # searches of several widths do not speculate
    assert counts["answered"] == counts["asked"] - counts["aborted"]
    assert min(counts["aborted"], counts["preempted"], counts["reset"]) > 0
    assert counts["answered"] > STEPS // 30
    assert (counts["speculated"] > STEPS // 100) == (drafts is not None)
    assert min(counts["along"], counts["compact"]) > 0
    assert (counts["under a grammar"] > 0) == (kind == "trained")
    assert counts["tied"] <= MOST_TIES * counts["answered"]
