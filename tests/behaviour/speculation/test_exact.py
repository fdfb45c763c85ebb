"""Speculation that is exact finds what plain steps find: tokens, scores, order and the reasons why hypotheses end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams

from tests.support.engine import BLOCK_SIZE, Engines
from tests.support.options import DRAFTED
from tests.support.pairs import (
    NOISE,
    ORDINARY,
    TRAINED,
    WIDTHS,
    Pair,
    check_exact,
    count_differing,
    grid,
    searches,
    speculating,
    steps_per_forward,
)
from tests.support.running import prompt_of, run, start_with, trained_prompts
from tests.support.unseen import grow_unseen_in_turn, pretend_unseen
from vllm_trie import beam_params
from vllm_trie.speculation.engine import lookahead
from vllm_trie.speculation.worker import roots, verify
from vllm_trie.speculation.worker.roots import ForestRoots
from vllm_trie.worker.rows.rows import GroupRows, Rows

pytestmark = pytest.mark.slow


def watch_accepted_paths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of every path that is accepted: the step that filled the roots' block, and how many steps there were."""
    commits, stock = [], verify.accepted_forest_path

    def accepted_path(one: Any, steps: Any, beams: Any) -> Any:
        commits.append((BLOCK_SIZE - one.start % BLOCK_SIZE, len(steps)))
        return stock(one, steps, beams)

    monkeypatch.setattr(verify, "accepted_forest_path", accepted_path)
    return commits


@pytest.mark.parametrize("num_layers", [1, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 3, 4)), 5])
def test_a_random_pair_finds_what_plain_steps_find(
    engines: Engines, random_pair: Callable[[str, float], Pair], num_layers: int
) -> None:
    engine = speculating(engines, random_pair("gqa", NOISE), num_layers, max_num_seqs=128)
    asked = grid([prompt_of(2 * BLOCK_SIZE, seed) for seed in range(40)], max_tokens=BLOCK_SIZE + 6)
    outputs = check_exact(engine, asked, ordinary=ORDINARY)
    assert max(map(steps_per_forward, outputs)) > 1 + num_layers / 2


def test_groups_that_search_together_unseen_find_what_plain_steps_find(
    engines: Engines, random_pair: Callable[[str, float], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, which the host does not see: it knows of rows what it would read there."""
    known, compared = roots._known_forest_roots, 0

    def known_as_read(rows: Rows, group: GroupRows, first: int) -> ForestRoots | None:
        nonlocal compared
        if (found := known(rows, group, first)) is not None:
            (read,) = roots._read_forest_roots(rows, [group], [first])
            compared += 1
            assert [table.tolist() for table in found.tables] == [table.tolist() for table in read.tables]
            assert [of_rows.tolist() for of_rows in found[1:4]] == [of_rows.tolist() for of_rows in read[1:4]]
            assert found.end == read.end
        return found

    monkeypatch.setattr(roots, "_known_forest_roots", known_as_read)
    pretend_unseen(monkeypatch)
    engine = speculating(engines, random_pair("gqa", NOISE), 5, max_num_seqs=128)
    asked = grid([prompt_of(2 * BLOCK_SIZE, seed) for seed in range(12)], max_tokens=BLOCK_SIZE + 6)
    outputs = check_exact(engine, asked)
    assert max(map(steps_per_forward, outputs)) > 2
    assert compared > len(asked)


@pytest.mark.nightly
def test_the_trained_pair_finds_what_plain_steps_find(engines: Engines) -> None:
    engine = speculating(engines, TRAINED, 4, max_num_seqs=128)
    prompts = trained_prompts([2 * BLOCK_SIZE] * 40)
    outputs = check_exact(engine, grid(prompts, max_tokens=BLOCK_SIZE + 6), ordinary=ORDINARY)
    assert sum(steps_per_forward(output) > 1.5 for output in outputs) > len(outputs) // 3


@pytest.mark.parametrize(("width", "draft_width"), [pytest.param(1, 3, marks=pytest.mark.nightly), (4, 12)])
def test_whatever_acts_on_a_search_acts_on_each_step_of_it(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, width: int, draft_width: int
) -> None:
    engine = speculating(engines, TRAINED, 4, max_num_seqs=128)
    grow_unseen_in_turn(monkeypatch)
    prompts = trained_prompts([BLOCK_SIZE - 9] * len(DRAFTED))
    widths = {"beam_width": width, "draft_width": draft_width}
    asked = [(p, {"max_tokens": 24, **widths, **one}) for p, one in zip(prompts, DRAFTED, strict=True)]
    outputs = check_exact(engine, asked, ordinary=ORDINARY)
    assert sum(steps_per_forward(output) > 1.2 for output in outputs) > len(outputs) // 3


@pytest.mark.nightly
def test_with_the_target_as_its_own_draft_model_every_step_is_found(
    engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few drafts: those that beam search would keep come first. Blocks become full at every step of commits."""
    model, num_layers, num_forwards = random_model("gqa"), 4, 8
    engine = speculating(engines, (model, model), num_layers, max_num_seqs=512, max_num_batched_tokens=2048)
    monkeypatch.setattr(lookahead, "FEW_BLOCKS", 1000)  # so that nothing is left out
    commits, num_steps = watch_accepted_paths(monkeypatch), num_layers + 1
    options = {"max_tokens": 1 + num_forwards * num_steps, "ignore_eos": True}
    lengths = range(BLOCK_SIZE - num_steps, BLOCK_SIZE)
    asked = [(prompt_of(n, n), {"beam_width": w, "draft_width": w, **options}) for w in WIDTHS for n in lengths]
    for output in check_exact(engine, asked):
        assert output.kv_transfer_params["trie_beam"]["target_forwards"] == 1 + num_forwards
    assert {fills for fills, count in commits if count == num_steps >= fills} == {*range(1, num_steps + 1)}


def test_searches_of_every_kind_share_a_batch(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = speculating(engines, TRAINED, 4, max_num_seqs=128)
    kinds: list[dict[str, Any]] = [
        {"speculation": "off"},
        {"speculation": "exact", "draft_width": 16},
        {"speculation": "off", "do_sample": True, "seed": 1},
        {"speculation": "sample", "seed": 2, "draft_width": 12},
        {"speculation": "sample", "seed": 2, "memory_mode": True},
        {"speculation": "exact", "beam_width": 1},
    ]
    prompts = trained_prompts([30] * len(kinds))
    jobs = [
        (p, beam_params(**{"beam_width": 4, "max_tokens": 34, **one})) for p, one in zip(prompts, kinds, strict=True)
    ]
    jobs += [(prompt, SamplingParams(temperature=0, max_tokens=40)) for prompt in prompts]

    def found() -> list[Any]:
        return run(engine, jobs)

    outputs = found()
    with monkeypatch.context() as patch:
        pretend_unseen(patch)
        unseen = found()
    assert count_differing(unseen, outputs) == 0
    assert [output.kv_transfer_params for output in unseen] == [output.kv_transfer_params for output in outputs]
    exact = [at for at, one in enumerate(kinds) if one["speculation"] == "exact"]
    asked = [(prompts[at], {"beam_width": 4, "max_tokens": 34, "n": 1, **kinds[at]}) for at in exact]
    for _, one in asked:
        del one["speculation"]
    count_differing([outputs[at] for at in exact], run(engine, searches(asked, "off")))
    alone = run(engine, jobs[len(kinds) :])
    assert [o.outputs[0].token_ids for o in outputs[len(kinds) :]] == [o.outputs[0].token_ids for o in alone]


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_beam_search_of_the_llm_finds_the_same(engines: Engines, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = speculating(engines, TRAINED, 4, max_num_seqs=128)
    commits = watch_accepted_paths(monkeypatch)
    prompts = [{"prompt_token_ids": p} for p in trained_prompts([40] * 3)]
    for params in (
        BeamSearchParams(beam_width=width, max_tokens=40),
        BeamSearchParams(beam_width=width, max_tokens=30, ignore_eos=True, length_penalty=2.0),
    ):
        found = []
        for speculation in ("off", "exact"):
            start_with(engine, monkeypatch, speculation=speculation)
            outputs = engine.llm.beam_search(prompts, params)
            found.append([[(s.tokens, s.text, round(s.cum_logprob, 3)) for s in o.sequences] for o in outputs])
        assert found[0] == found[1]
    assert max(count for _, count in commits) > 1
