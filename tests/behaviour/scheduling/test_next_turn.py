"""A chat that goes on from an answer finds the answer's blocks in the prefix cache, and nothing there is untrue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.cached import WatchedCache
from tests.support.disturb import preempt_all
from tests.support.engine import BLOCK_SIZE, Engine, Engines
from tests.support.options import ITEMS, SAMPLED
from tests.support.pairs import NOISE, Pair, drafting, looking_up
from tests.support.running import BYTES_PER_BLOCK, MOST_TIES, Job, count_ties, prompt_of, run
from tests.support.sweep import sweep
from vllm_trie import beam_params
from vllm_trie.engine.kv_cache import BeamKVCacheManager

pytestmark = pytest.mark.slow

LONG: list[dict[str, Any]] = [
    {"beam_width": 5, "max_tokens": 90, "ignore_eos": True},
    {"beam_width": 1, "max_tokens": 70, "ignore_eos": True},
    {"beam_width": 4, "max_tokens": 90},  # which ends long before
    {"beam_width": 4, "max_tokens": 60, "early_stopping": "never", "length_penalty": 3.0, "min_tokens": 35},
]
ALONG_ITEMS = [{"beam_width": 4, "max_tokens": 12, "allowed_sequences": ITEMS, "prompt": 30}]
SAMPLED_WITH_DRAFTS: list[dict[str, Any]] = [{"speculation": "sample", "seed": 1, "max_tokens": 60, "ignore_eos": True}]


@dataclass(frozen=True)
class Mode:
    """An engine, and what is searched in it."""

    kind: str
    asked: Sequence[dict[str, Any]] = field(repr=False)
    options: dict[str, Any] = field(default_factory=dict)
    num_layers: int = 0  # drafted by a draft model, if there is one
    enters: bool | None = True  # answers into the prefix cache; None: as it may be

    def start(self, engines: Engines, random_pair: Callable[[str, float], Pair]) -> Engine:
        target, draft = random_pair(self.kind, NOISE)
        return engines(target, **self.options, **(drafting(draft, self.num_layers) if self.num_layers else {}))

    def jobs(self) -> list[Job]:
        """The searches, and an ordinary request."""
        jobs = []
        for number, own in enumerate(self.asked):
            options = {"beam_width": 3} | own
            prompt = prompt_of(options.pop("prompt", 40 + 9 * number), number)
            jobs.append((prompt, beam_params(**options, n=options["beam_width"])))
        return [*jobs, (prompt_of(40), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))]


def each(asked: Sequence[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    return [options | more for options in asked]


SAMPLED_LONG = each(SAMPLED, max_tokens=50, ignore_eos=True, speculation="off")
MODES = {
    "async": Mode("gqa", [*LONG, *ALONG_ITEMS, *SAMPLED_LONG]),
    "sync": Mode("gqa", [*LONG, *ALONG_ITEMS], {"async_scheduling": False, "max_num_batched_tokens": 64}),
    "few blocks": Mode("gqa", LONG, {"kv_cache_memory_bytes": 26 * BYTES_PER_BLOCK}),
    "a window": Mode("mistral", LONG),
    "windows": Mode("gemma2", [*LONG, *ALONG_ITEMS]),
    "states": Mode("granite4", [*LONG, *ALONG_ITEMS]),
    "exact": Mode("gqa", each([*LONG, *ALONG_ITEMS], speculation="exact"), {}, 3),
    "auto": Mode("gqa", each(LONG, speculation="auto"), {}, 3, enters=None),  # as forests pay, and end
    "off": Mode("gqa", each(LONG, speculation="off"), {}, 3, enters=False),
    "exact with windows": Mode("gemma2", each(LONG, speculation="exact"), {}, 3, enters=False),
    "looking up": Mode("gqa", each(LONG, speculation="exact"), looking_up(3)),
    "sample": Mode(
        "gqa",
        [
            *SAMPLED_WITH_DRAFTS,
            *each(SAMPLED_WITH_DRAFTS, replacement=True),
            *each(SAMPLED_WITH_DRAFTS, memory_mode=True),
        ],
        {},
        3,
    ),
}


@pytest.fixture(params=sweep(MODES, "windows", "states", "exact"))
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param


def test_all_that_is_cached_is_what_its_history_leads_to(
    mode: Mode, engines: Engines, random_pair: Callable[[str, float], Pair]
) -> None:
    engine, steps = mode.start(engines, random_pair), 0
    before = engine.scheduler.kv_cache_manager.total_counts().cached

    def preempt_twice() -> None:
        nonlocal steps
        steps += 1
        if steps in (15, 40):
            preempt_all(engine)

    with WatchedCache(engine) as cache:
        for after_step in (lambda: None, preempt_twice):
            run(engine, mode.jobs(), after_step)
            assert cache.check() > 0
    has_entered = engine.scheduler.kv_cache_manager.total_counts().cached > before
    assert mode.enters in (None, has_entered)


def test_the_next_turn_computes_its_tail_alone_and_answers_as_without_the_cache(
    engines: Engines, random_model: Callable[[str], Path]
) -> None:
    for kind in ("gqa", "gemma2", "granite4", "mamba2"):
        engine = engines(random_model(kind), enable_prefix_caching=True)  # by default not for mamba2
        assert engine.llm.llm_engine.reset_prefix_cache()
        full = 2 * max(2 * BLOCK_SIZE, engine.core.vllm_config.cache_config.block_size)
        # Behind the last full block come few tokens, or the window in front of it is not held any more.
        asked = [(prompt_of(length, length), full + 4 - length) for length in (20, 40, 70)]
        first = run(engine, [(prompt, beam_params(4, n=2, max_tokens=n, ignore_eos=True)) for prompt, n in asked])
        turns = [
            ([*prompt, *output.outputs[0].token_ids, *prompt_of(15, number)], beam_params(4, n=4, max_tokens=40))
            for number, ((prompt, _), output) in enumerate(zip(asked, first, strict=True))
        ]
        second = run(engine, turns)
        assert [output.num_cached_tokens for output in second] == [full] * len(turns)
        without = run(engines(random_model(kind), enable_prefix_caching=False), turns)
        assert count_ties(second, without) <= MOST_TIES * 4 * len(turns)


def test_hypotheses_that_ended_long_ago_are_still_cached(engines: Engines, random_model: Callable[[str], Path]) -> None:
    """Also where their blocks have been given back since: that holds nothing, and vLLM evicts them last."""
    engine = engines(random_model("gqa"))
    assert engine.llm.llm_engine.reset_prefix_cache()
    options = {"early_stopping": "never", "length_penalty": -3.0, "min_tokens": 30, "max_tokens": 120}
    prompts = [prompt_of(40, seed) for seed in range(6)]
    (*outputs,) = run(engine, [(prompt, beam_params(3, n=3, **options)) for prompt in prompts])
    lengths = [len(prompt) + len(o.outputs[0].token_ids) for prompt, o in zip(prompts, outputs, strict=True)]
    assert min(lengths) < 40 + 120, "none ended early"
    for prompt, output, length in zip(prompts, outputs, lengths, strict=True):
        turn = [*prompt, *output.outputs[0].token_ids, *prompt_of(BLOCK_SIZE)]
        (next_output,) = engine.generate([turn], SamplingParams(temperature=0, max_tokens=1))
        assert next_output.num_cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_a_salt_keeps_answers_to_those_who_know_it(engines: Engines, random_model: Callable[[str], Path]) -> None:
    engine = engines(random_model("gqa"))
    assert engine.llm.llm_engine.reset_prefix_cache()
    params = beam_params(4, max_tokens=60, ignore_eos=True)
    greedy, cached = SamplingParams(temperature=0, max_tokens=1), []
    prompt = prompt_of(40)
    (output,) = engine.llm.generate({"prompt_token_ids": prompt, "cache_salt": "ours"}, params, use_tqdm=False)
    turn = [*prompt, *output.outputs[0].token_ids, *prompt_of(BLOCK_SIZE)]
    for salt in ("theirs", "ours"):
        (answer,) = engine.llm.generate({"prompt_token_ids": turn, "cache_salt": salt}, greedy, use_tqdm=False)
        cached.append(answer.num_cached_tokens)
    assert cached == [0, 99 // BLOCK_SIZE * BLOCK_SIZE]


FULL_AT_THE_END = [  # what the last step but one computes fills a block
    {"beam_width": 5, "prompt": n, "max_tokens": 3 * BLOCK_SIZE + 1 - n, "ignore_eos": True, "speculation": "exact"}
    for n in range(40, 46)
]
Tamper = Callable[[pytest.MonkeyPatch, Engine], None]
cache_row = BeamKVCacheManager.cache_row


def _of_another_row(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    def cache(self: Any, request_id: str, row: int, *args: Any) -> None:
        cache_row(self, request_id, (row + 1) % self._groups[request_id].tries[0].width, *args)

    patch.setattr(BeamKVCacheManager, "cache_row", cache)


def _with_the_last_token(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    def cache(self: Any, request_id: str, row: int, num_tokens: int, *args: Any) -> None:
        cache_row(self, request_id, row, num_tokens + 1, *args)

    patch.setattr(BeamKVCacheManager, "cache_row", cache)


def _with_a_draft_models_that_is_behind(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    patch.setattr(engine.scheduler._answers, "_has_draft_kv", False)
    patch.setattr(engine.scheduler._answers, "_enters", True)


def _with_what_a_forest_computed(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    def cache(self: Any, request_id: str, row: int, num_tokens: int, history: Any) -> None:
        group = engine.scheduler.groups[request_id]
        cache_row(self, request_id, row, group.plan.prompt_length + group.best_end[0], history)

    patch.setattr(BeamKVCacheManager, "cache_row", cache)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mode", "tamper"),
    [
        (Mode("gqa", LONG), _of_another_row),
        (Mode("granite4", LONG), _of_another_row),
        (Mode("gqa", [{"max_tokens": 3 * BLOCK_SIZE - 40, "ignore_eos": True}]), _with_the_last_token),
        (MODES["off"], _with_a_draft_models_that_is_behind),
        (MODES["exact with windows"], _with_a_draft_models_that_is_behind),
        (Mode("gqa", FULL_AT_THE_END, {}, 3), _with_what_a_forest_computed),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_poisoned_block_would_be_seen(
    mode: Mode,
    tamper: Tamper,
    engines: Engines,
    random_pair: Callable[[str, float], Pair],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = mode.start(engines, random_pair)
    with WatchedCache(engine) as cache:
        with monkeypatch.context() as patch:
            tamper(patch, engine)
            run(engine, mode.jobs())
        with pytest.raises(AssertionError, match="is poisoned"):
            cache.check()
