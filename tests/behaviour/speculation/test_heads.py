"""Beams that are drafted by an EAGLE-3 head: answers are plain steps', and the head says what it says alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.worker.cpu_worker import CPUWorker

from benchmarks.stdlib_pair.head import HEAD, load_head, save, untrained
from tests.support.disturb import Unlucky, preempt_all
from tests.support.draft_alone import search
from tests.support.engine import BLOCK_SIZE, KV_CACHE_BYTES, TRAINED_TARGET, Engine, Engines
from tests.support.head_alone import HeadAlone, with_head
from tests.support.pairs import ORDINARY, check_exact, count_differing, grid, searches, sizes_in, steps_per_forward
from tests.support.reference import SCORE_TOLERANCE, load
from tests.support.running import prompt_of, run, trained_prompts
from tests.support.sweep import sweep
from tests.support.trained_pair import SAMPLED, WARPED, answer, own_sum, tokens
from tests.support.trained_pair import search as draw
from tests.support.unseen import grow_unseen_in_turn
from vllm_trie import beam_params
from vllm_trie.speculation.search.forest_size import PLAIN, ForestSize
from vllm_trie.speculation.worker.hidden_states import DraftHiddenStates

pytestmark = pytest.mark.slow

LAYERS = 3
PROMPTS = trained_prompts([2 * BLOCK_SIZE] * 40)
SAMPLED_MODES = {"sampled": SAMPLED, "warped": SAMPLED | WARPED, "one": SAMPLED | {"memory_mode": True}}


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return with_head(engines, LAYERS, max_num_seqs=128)


def test_an_engine_runs_the_head_when_it_measures_its_memory(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no KV cache then."""
    engines.close()
    monkeypatch.setattr(CPUWorker, "_should_warm_up_model", lambda _: True)
    assert with_head(engines, 1, max_num_seqs=128).runner.speculation.takes_trees


@pytest.mark.parametrize("num_layers", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_a_head_finds_what_plain_steps_find(engines: Engines, num_layers: int) -> None:
    engine = with_head(engines, num_layers, max_num_seqs=128)
    outputs = check_exact(engine, grid(PROMPTS, max_tokens=BLOCK_SIZE + 6), ordinary=ORDINARY)
    assert max(map(steps_per_forward, outputs)) > 1 + num_layers / 3


@pytest.mark.nightly
def test_a_head_that_knows_nothing_finds_the_same(engines: Engines, tmp_path: Path) -> None:
    save(untrained(load(TRAINED_TARGET)), tmp_path / "head")
    engine = with_head(engines, LAYERS, tmp_path / "head")
    asked = [
        (p, {"beam_width": w, "draft_width": 2 * w, "max_tokens": 40})
        for w, p in enumerate(trained_prompts([20] * 4), 1)
    ]
    check_exact(engine, asked, ordinary=ORDINARY)


@pytest.mark.nightly
def test_searches_are_preempted_in_a_batch_with_ordinary_requests(engine: Engine) -> None:
    steps = 0

    def after_step() -> None:
        nonlocal steps
        steps += 1
        if steps % 9 == 0:
            preempt_all(engine)

    check_exact(engine, grid(PROMPTS[:12], max_tokens=BLOCK_SIZE + 6), after_step, ordinary=ORDINARY)
    assert steps > 18


@pytest.mark.nightly
def test_searches_whose_forests_change_their_size_are_preempted_one_by_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = sizes_in(monkeypatch, PLAIN, ForestSize(LAYERS, 8), ForestSize(1, 16), ForestSize(2, 8))
    unlucky = Unlucky(engine, share=0.2)
    asked = grid(PROMPTS[:12], max_tokens=BLOCK_SIZE + 6)
    outputs = check_exact(engine, asked, unlucky.preempt_the_last, ordinary=ORDINARY, speculation="auto")
    assert unlucky.num_preempted > 5
    assert len(chosen) > 5 * len(asked)
    assert max(map(steps_per_forward, outputs)) > 1.3


def test_a_head_is_no_model_to_contrast(engine: Engine) -> None:
    with pytest.raises(
        ValueError, match=r"contrast=\{\} needs a draft model, and this engine drafts by method='eagle3'; start it"
    ):
        engine.generate([prompt_of(9)], beam_params(3, contrast={}, max_tokens=9))


def test_hidden_states_take_their_memory_from_the_kv_cache(engine: Engine) -> None:
    kept = [*engine.runner.kv_caches, engine.runner.speculation.rows.hidden_states.by_slot]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    num_bytes, num_blocks = sum(storages.values()), engine.runner.kv_cache_config.num_blocks
    assert num_bytes <= KV_CACHE_BYTES < num_bytes / num_blocks * (num_blocks + 1)


@pytest.mark.parametrize("mode", sweep(SAMPLED_MODES, "warped", "one"))
def test_what_is_sampled_follows_its_seed_and_is_the_targets_own(engine: Engine, mode: dict[str, Any]) -> None:
    prompts = trained_prompts([32] * 2)
    outputs, again, others = (draw(engine, prompts, **mode | {"seed": seed}) for seed in (5, 5, 6))
    assert tokens(outputs) == tokens(again) != tokens(others)
    assert sum(output.kv_transfer_params["trie_beam"]["accepted"] for output in outputs) > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        for generated, total in answer(output):
            if total is not None:
                assert total == pytest.approx(own_sum(prompt, generated), abs=SCORE_TOLERANCE * len(generated))


@pytest.fixture
def narrow(engines: Engines) -> Engine:
    """An engine whose prompts and rows take several forwards to catch up with."""
    return with_head(engines, LAYERS, max_num_batched_tokens=64)


@pytest.fixture
def alone(narrow: Engine, monkeypatch: pytest.MonkeyPatch) -> HeadAlone:
    return HeadAlone(narrow, load_head(load(TRAINED_TARGET), HEAD), monkeypatch)


@pytest.mark.nightly
def test_the_head_says_what_it_says_alone(narrow: Engine, alone: HeadAlone, monkeypatch: pytest.MonkeyPatch) -> None:
    grow_unseen_in_turn(monkeypatch)
    assert count_differing(*search(narrow, monkeypatch)) == 0
    assert alone.num_wrong == 0
    assert min(alone.num_unseen, alone.num_compared - alone.num_unseen) > 500
    assert alone.num_caught_up > 0


@pytest.mark.nightly
def test_the_next_turn_finds_in_the_prefix_cache_what_the_head_goes_on_from(
    narrow: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert narrow.llm.llm_engine.reset_prefix_cache()
    prompts, unlucky = trained_prompts([40, 50]), Unlucky(narrow, share=0.1)
    options = {"beam_width": 3, "draft_width": 9, "ignore_eos": True}
    first = run(narrow, searches([(p, options | {"max_tokens": 70}) for p in prompts]), unlucky.preempt_the_last)
    assert unlucky.num_preempted > 2
    turns = [[*p, *output.outputs[0].token_ids, 9, 13] for p, output in zip(prompts, first, strict=True)]
    alone = HeadAlone(narrow, load_head(load(TRAINED_TARGET), HEAD), monkeypatch)
    outputs = check_exact(narrow, [(turn, options | {"max_tokens": 8}) for turn in turns])
    assert all(output.num_cached_tokens > len(prompt) for prompt, output in zip(prompts, outputs, strict=True))
    assert alone.num_compared > 20
    assert alone.num_wrong == 0


def leave_out_copies_of_blocks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = engine.runner.rows.kv
    for views in ("_blocks", "_indexable_blocks"):
        monkeypatch.setattr(kv, views, getattr(kv, views)[:-1])


def leave_accepted_tokens_where_they_are(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = engine.runner.rows.kv
    monkeypatch.setattr(kv, "_layers", [kv._layers[0][:-1], *kv._layers[1:]])


def keep_none(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftHiddenStates, "keep", lambda *_: None)


@pytest.mark.nightly
@pytest.mark.parametrize("spoil", [leave_out_copies_of_blocks, leave_accepted_tokens_where_they_are, keep_none])
def test_where_hidden_states_do_not_follow_beams_it_says_something_else_and_the_search_finds_the_same(
    narrow: Engine,
    alone: HeadAlone,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Engine, pytest.MonkeyPatch], None],
) -> None:
    spoil(narrow, monkeypatch)
    assert count_differing(*search(narrow, monkeypatch)) == 0
    assert alone.num_wrong > 0
