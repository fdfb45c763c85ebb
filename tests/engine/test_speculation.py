"""Speculation that is exact finds what plain steps find: tokens, scores, order and the reasons why hypotheses end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from allpairspy import AllPairs
from vllm import SamplingParams

from tests import models
from tests.conftest import BLOCK_SIZE, ROOT, TRAINED_TARGET, Engine, Engines
from tests.engine.test_parity import Case, trained_prompts
from tests.engine.test_preemption import MOST_TIES, Clumsy, run
from tests.engine.test_scheduling import prompt_of
from tests.reference import NEAR_TIE, SCORE_TOLERANCE
from vllm_trie import beam_params

TRAINED_DRAFT = ROOT / "benchmarks" / "stdlib_pair" / "draft"
NOISE, SEED = 0.012, 3  # about half of the drafts of one beam are accepted

Pair = tuple[Path, Path]
Asked = tuple[list[int], dict[str, Any]]  # a prompt, and the options of a search


@pytest.fixture(scope="session")
def random_pair(
    random_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, float], Pair]:
    """A random model of a kind, and a draft of it with so much noise."""

    @cache
    def make(kind: str, noise: float) -> Pair:
        target = random_model(kind)
        return target, models.make_draft(target, tmp_path_factory.mktemp(f"{kind}-draft"), noise, SEED)

    return make


def speculating(engines: Engines, pair: Pair, num_layers: int, **options: Any) -> Engine:
    """An engine with a draft model, that drafts `num_layers` tokens."""
    target, draft = pair
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": num_layers}
    return engines(target, speculative_config=config, **options)


def searches(asked: Iterable[Asked], speculation: str = "exact") -> list[tuple[list[int], SamplingParams]]:
    """The same searches, speculating or not."""
    jobs = []
    for prompt, options in asked:
        own = {name: value for name, value in options.items() if speculation != "off" or name != "draft_width"}
        own.setdefault("n", own["beam_width"])
        jobs.append((prompt, beam_params(**own, speculation=speculation)))
    return jobs


def steps_per_forward(output: Any) -> float:
    return output.kv_transfer_params["trie_beam"]["steps_per_forward"]


def count_differing(outputs: list[Any], expected: list[Any]) -> int:
    """How many hypotheses differ, each by a near-tie only.

    Raises:
        AssertionError: one differs otherwise, in anything that is reported of it.
    """
    ties = 0
    for number, (output, other) in enumerate(zip(outputs, expected, strict=True)):
        for rank, (ours, theirs) in enumerate(zip(output.outputs, other.outputs, strict=True)):
            where = (number, rank, ours, theirs)
            if ours.cumulative_logprob is None:
                assert (ours.token_ids, ours.stop_reason) == (theirs.token_ids, theirs.stop_reason), where
                continue
            difference = abs(ours.cumulative_logprob - theirs.cumulative_logprob)
            assert difference <= NEAR_TIE * len(ours.token_ids), where
            if ours.token_ids != theirs.token_ids:
                ties += 1
                continue
            assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason), where
            assert ours.stop_reason == theirs.stop_reason, where
            for place, same_place in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
                found, plain = ({t: e.logprob for t, e in entries.items()} for entries in (place, same_place))
                assert found == pytest.approx(plain, abs=SCORE_TOLERANCE), where
                assert [e.rank for e in place.values()] == [e.rank for e in same_place.values()], where
    return ties


def check_exact(engine: Engine, asked: list[Asked], after_step: Callable[[], None] = lambda: None) -> list[Any]:
    """Search in both ways, and compare all that comes back. Returns what speculation found."""
    plain = run(engine, searches(asked, "off"), lambda: None)
    outputs = run(engine, searches(asked), after_step)
    ties = count_differing(outputs, plain)
    assert ties <= MOST_TIES * sum(len(output.outputs) for output in outputs)
    return outputs


WIDTHS = [1, 2, 4, 8]
DRAFTS_PER_BEAM = [1, 2, 4]
PROMPT_LENGTHS = [1, BLOCK_SIZE - 3, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 2, 2 * BLOCK_SIZE - 5]
GRID = [WIDTHS, DRAFTS_PER_BEAM, PROMPT_LENGTHS, [False, True]]


def grid(prompts: list[list[int]], max_tokens: int) -> list[Asked]:
    """Every pair of values of `GRID` at least once."""
    asked = []
    for (width, factor, length, ignore_eos), prompt in zip(AllPairs(GRID), prompts, strict=False):
        options = {"beam_width": width, "draft_width": factor * width, "ignore_eos": ignore_eos}
        asked.append((prompt[:length], options | {"max_tokens": max_tokens}))
    return asked


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5])
def test_a_random_pair_finds_what_plain_steps_find(
    engines: Engines, random_pair: Callable[[str, float], Pair], num_layers: int
) -> None:
    engine = speculating(engines, random_pair("gqa", NOISE), num_layers, max_num_seqs=128)
    asked = grid([prompt_of(2 * BLOCK_SIZE, seed) for seed in range(40)], max_tokens=2 * BLOCK_SIZE + 6)
    outputs = check_exact(engine, asked)
    assert max(map(steps_per_forward, outputs)) > 1.5


@pytest.mark.parametrize("caching", [True, False])
def test_groups_preempted_whenever_they_are_further_find_the_same(
    engines: Engines, random_pair: Callable[[str, float], Pair], caching: bool
) -> None:
    pair, limits = random_pair("gqa", NOISE), {"max_num_batched_tokens": 192, "enable_prefix_caching": caching}
    engine = speculating(engines, pair, 3, **limits)
    widths = {1: True, 3: False, 6: True}  # and whether EOS is ignored
    options = [{"beam_width": w, "ignore_eos": ignore, "draft_width": 3 * w} for w, ignore in widths.items()]
    asked = [(prompt_of(length, length), {"max_tokens": 45, **one}) for length in (20, 70) for one in options]
    clumsy = Clumsy(engine)
    outputs = check_exact(engine, asked, clumsy.preempt_whenever_a_search_is_further)
    assert steps_per_forward(outputs[0]) > 3, "nothing speculated between preemptions"
    assert clumsy.num_preempted > 30
    assert clumsy.num_steps < 6 * clumsy.num_preempted, "preempted groups hardly get on"
