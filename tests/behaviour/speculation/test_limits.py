"""What is scarce makes speculation less, down to plain steps; it never goes beyond a limit, and changes no answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from tests.support.engine import BLOCK_SIZE, Engine, Engines
from tests.support.pairs import (
    NOISE,
    TRAINED,
    Asked,
    Pair,
    check_exact,
    count_differing,
    searches,
    speculating,
    steps_per_forward,
)
from tests.support.running import BYTES_PER_BLOCK, prompt_of, run, trained_prompts
from tests.support.sweep import sweep
from vllm_trie import beam_params
from vllm_trie.compat.sources import minor_vllm_version
from vllm_trie.messages import SpeculationBudget, group_step_messages
from vllm_trie.speculation.worker.forest_step import NO_BLOCK, ForestStep

pytestmark = pytest.mark.slow

BYTES_PER_PAIR_OF_BLOCKS = 2 * BYTES_PER_BLOCK  # the target's and the draft's


@pytest.fixture
def pair(random_pair: Callable[[str, float], Pair]) -> Pair:
    return random_pair("gqa", NOISE)


class Watch:
    """What every step was given, checked against what the worker makes of it.

    Attributes:
        budgets: The group's width and its budget, None for a plain step; of each that could have speculated.
        least_free: KV blocks that were free when there were fewest.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.budgets: list[tuple[int, SpeculationBudget | None]] = []
        self.least_free = engine.scheduler.kv_cache_manager.num_usable_blocks
        scheduler, drafter = engine.scheduler, engine.runner.speculation.drafter
        schedule, draft, manager = scheduler.schedule, drafter.draft, scheduler.kv_cache_manager

        def scheduled(*args: Any) -> Any:
            output = schedule(*args)
            for group_id, step in group_step_messages(output).items():
                group = scheduler.groups[group_id]
                may_grow = group.length >= group.forests.first_length and group.num_steps_left > 1
                if step.decodes and step.selects and may_grow:
                    self.budgets.append((group.plan.width, step.budget))
            self.least_free = min(self.least_free, manager.block_pool.get_num_free_blocks())
            return output

        def drafted(context: Any, groups: Any, output: Any) -> dict[str, ForestStep]:
            forests = draft(context, groups, output)
            counts = output.num_scheduled_tokens.values()
            assert len(counts) <= scheduler.max_num_running_reqs
            assert sum(counts) == output.total_num_scheduled_tokens <= scheduler.max_num_scheduled_tokens
            for one in forests.values():
                assert one.num_layers > 0, "what was given is too little to draft with"
                assert one.forest.num_drafts <= one.budget.max_drafts
                for table, block_size in zip(one.blocks, one.block_sizes, strict=True):
                    for blocks, nodes in zip(table, one.forest.rows, strict=True):
                        own = blocks[one.start // block_size : (one.start + len(nodes) - 1) // block_size + 1]
                        assert (own != NO_BLOCK).all(), "a tree goes beyond its blocks"
            return forests

        monkeypatch.setattr(scheduler, "schedule", scheduled)
        monkeypatch.setattr(drafter, "draft", drafted)

    def happened(self) -> set[str]:
        given = [(width, budget) for width, budget in self.budgets if budget is not None]
        times = {
            "plain": len(self.budgets) - len(given),
            "spare blocks": sum(any(budget.spare_blocks) for _, budget in given),
            "few drafts": sum(budget.max_drafts < width for width, budget in given),
            "fewer layers": sum(budget.num_layers < 4 for _, budget in given),
            "no free block": self.least_free == 0,
        }
        return {name for name, count in times.items() if count}


FEW_BLOCKS = {"kv_cache_memory_bytes": 20 * BYTES_PER_PAIR_OF_BLOCKS}
SCARCE: dict[str, tuple[dict[str, int], set[str]]] = {
    "tokens": ({"max_num_seqs": 16, "max_num_batched_tokens": 24}, {"plain", "few drafts"}),
    "blocks": (FEW_BLOCKS, {"plain", "no free block", "fewer layers", "few drafts", "spare blocks"}),
    "both": ({"max_num_seqs": 16, "max_num_batched_tokens": 24, **FEW_BLOCKS}, {"plain", "few drafts"}),
}


@pytest.mark.parametrize("scarce", sweep([*SCARCE], "blocks"))
def test_scarcity_makes_speculation_less_and_changes_no_answer(
    engines: Engines, pair: Pair, scarce: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, must_happen = SCARCE[scarce]
    engine = speculating(engines, pair, 4, **options)
    widths = [{"beam_width": w, "draft_width": 4 * w, "ignore_eos": True, "max_tokens": 70} for w in (6, 4, 1, 2)]
    asked = [(prompt_of(40, seed), one) for seed, one in enumerate(widths)]
    ordinary = [(prompt_of(30, seed), SamplingParams(temperature=0, max_tokens=40)) for seed in (7, 8)]
    watch = Watch(engine, monkeypatch)
    outputs = check_exact(engine, asked, ordinary=ordinary)
    assert max(map(steps_per_forward, outputs)) > 1.5
    assert must_happen <= watch.happened()


@pytest.mark.parametrize("scarce", sweep([*SCARCE], "blocks"))
def test_sampled_searches_are_given_a_whole_layer_or_nothing(
    engines: Engines, pair: Pair, scarce: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = speculating(engines, pair, 4, **SCARCE[scarce][0])
    sampled = {"speculation": "sample", "ignore_eos": True, "max_tokens": 70}
    jobs = [
        (prompt_of(40, seed), beam_params(width, memory_mode=width == 5, seed=seed, **sampled))
        for seed, width in enumerate((4, 3, 5, 2))
    ]
    watch = Watch(engine, monkeypatch)
    outputs = run(engine, jobs)
    assert max(map(steps_per_forward, outputs)) > 1.1
    assert "plain" in watch.happened()


def test_a_group_whose_next_blocks_are_all_that_it_may_take_stays_within_those_it_has(
    engines: Engines, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = speculating(engines, pair, 4, max_num_seqs=80)
    watch = Watch(engine, monkeypatch)
    check_exact(engine, [(prompt_of(20), {"beam_width": 20, "draft_width": 40, "ignore_eos": True, "max_tokens": 40})])
    assert "fewer layers" in watch.happened()
    assert watch.least_free > engine.scheduler.kv_cache_manager.num_usable_blocks // 2


def test_with_async_scheduling_nobody_lacks_blocks_that_are_lent(
    engines: Engines, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = {"kv_cache_memory_bytes": 18 * BYTES_PER_PAIR_OF_BLOCKS}
    engine, num_lent, lacking = speculating(engines, pair, 4, async_scheduling=True, **blocks), 0, list[int]()
    manager = engine.scheduler.kv_cache_manager
    allocate_slots = manager.allocate_slots

    def allocated(request: Request, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_lent
        lent = sum(len(group.lookahead_blocks) for group in manager._groups.values())
        blocks, num_lent = allocate_slots(request, *args, **kwargs), num_lent + lent
        if blocks is None and request.status == RequestStatus.RUNNING:
            lacking.append(lent)
        return blocks

    monkeypatch.setattr(manager, "allocate_slots", allocated)
    options = {"beam_width": 6, "draft_width": 24, "ignore_eos": True, "max_tokens": 70}
    greedy = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    ordinary = [(prompt_of(30, seed), greedy) for seed in (7, 8)]
    run(engine, [*searches([(prompt_of(40, 1), options)]), *ordinary])
    assert num_lent > 0
    assert {*lacking} == {0}


def test_a_search_that_is_accepted_has_blocks_to_start(engines: Engines, pair: Pair) -> None:
    engine = speculating(engines, pair, 4, kv_cache_memory_bytes=18 * BYTES_PER_PAIR_OF_BLOCKS)
    prompt, reasons = prompt_of(3 * BLOCK_SIZE - 1), list[str]()
    for width in range(13, 16):
        (output,) = run(engine, searches([(prompt, {"beam_width": width, "n": 1, "max_tokens": 2})]))
        reasons.append(str(output.outputs[0].stop_reason))
    accepted = [reason for reason in reasons if "KV blocks to start" not in reason]
    assert 0 < len(accepted) < len(reasons)
    assert not any("KV blocks" in reason for reason in accepted)


def test_logprobs_of_a_request_that_joins_a_speculating_batch_are_its_own(engines: Engines, pair: Pair) -> None:
    """Its first token has no drafts after it, where groups take several steps."""
    engine = speculating(engines, pair, 3, max_num_batched_tokens=192, enable_prefix_caching=False)
    options = {"beam_width": 2, "draft_width": 6, "ignore_eos": True, "max_tokens": 40}
    late = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
    ordinary = [(prompt_of(length, seed), late) for seed, length in enumerate((400, 150, 300))]
    check_exact(engine, [(prompt_of(20), options)], ordinary=ordinary)


def test_steps_end_at_max_model_len_and_max_tokens(engines: Engines, pair: Pair) -> None:
    engine = speculating(engines, pair, 5)
    asked: list[Asked] = []
    for width in (1, 4):
        options = {"beam_width": width, "draft_width": 3 * width, "ignore_eos": True}
        asked += [(prompt_of(512 - room), {"max_tokens": 200, **options}) for room in (1, 2, 3, 6, 9, 34)]
        asked += [(prompt_of(27), {"max_tokens": count, **options}) for count in (1, 2, 3, 5, 6, 7, 8)]
    outputs = check_exact(engine, asked)
    lengths = [min(options["max_tokens"], 512 - len(prompt)) for prompt, options in asked]
    assert [{len(one.token_ids) for one in output.outputs} for output in outputs] == [{n} for n in lengths]
    drafted = [output.kv_transfer_params["trie_beam"]["drafted"] for output in outputs]
    assert {count for count, length in zip(drafted, lengths, strict=True) if length < 3} == {0}
    assert max(map(steps_per_forward, outputs)) > 1.5


drafts_may_be_shorter = pytest.mark.skipif(
    minor_vllm_version(vllm.__version__) != "0.32",
    reason="from vLLM 0.33 on no request may be longer than the draft model takes",
)


@drafts_may_be_shorter
def test_beyond_the_length_that_the_draft_model_takes_steps_are_plain(engines: Engines, pair: Pair) -> None:
    target, draft = pair
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4, "max_model_len": 96}
    engine = engines(target, speculative_config=config)
    options = {"beam_width": 1, "draft_width": 3, "ignore_eos": True, "max_tokens": 40}
    asked = [(prompt_of(length, length), options) for length in (60, 95, 96, 120)]
    short, *longer = [steps_per_forward(*check_exact(engine, [one])) for one in asked]
    assert short > 1.5
    assert longer == [1.0, 1.0, 1.0]


@drafts_may_be_shorter
def test_a_search_too_long_for_the_draft_model_leaves_others_their_drafts(engines: Engines, pair: Pair) -> None:
    target, draft = pair
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4, "max_model_len": 96}
    engine = engines(target, speculative_config=config, enable_prefix_caching=False, async_scheduling=False)
    core, num_steps = engine.llm.llm_engine, 0
    options = {"beam_width": 2, "draft_width": 6, "ignore_eos": True, "max_tokens": 40}

    def count() -> None:
        nonlocal num_steps
        num_steps += 1

    def found() -> tuple[list[Any], int]:
        """What a search and an ordinary request find, and in how many steps of the engine."""
        nonlocal num_steps
        num_steps = 0
        greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        outputs = run(engine, [*searches([(prompt_of(30), options)]), (prompt_of(20, 3), greedy)], count)
        return outputs, num_steps

    alone, steps_alone = found()
    assert steps_per_forward(alone[0]) > 1.5
    assert steps_alone < 35, "drafts of the ordinary request are not accepted either"
    ((prompt, params),) = searches([(prompt_of(120, 5), options | {"max_tokens": steps_alone - 1})])
    core.add_request("9", {"prompt_token_ids": prompt}, params)
    core.step()
    assert [group.length for group in engine.scheduler.groups.values()] == [1]
    together, steps_together = found()
    assert steps_together == steps_alone
    assert count_differing(together, alone) == 0
    assert together[0].kv_transfer_params == alone[0].kv_transfer_params


def test_prompts_that_are_cached_to_the_last_token_find_the_same(
    engines: Engines, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM pads them with drafts that nobody drafted."""
    engine = speculating(engines, pair, 4)
    padded, drop = [], engine.scheduler._drop_padding

    def dropping(output: Any) -> None:
        padded.extend(output.scheduled_spec_decode_tokens.keys() & engine.scheduler.groups.keys())
        drop(output)

    monkeypatch.setattr(engine.scheduler, "_drop_padding", dropping)
    options = {"beam_width": 3, "draft_width": 9, "ignore_eos": True, "max_tokens": 40}
    asked = [(prompt_of(length, length), options) for length in (BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 1)]
    ordinary = [(prompt_of(50), SamplingParams(temperature=0, max_tokens=40))]
    check_exact(engine, asked, ordinary=ordinary)
    assert len(padded) >= 2
    assert engine.llm.llm_engine.reset_prefix_cache()
    check_exact(engine, asked, ordinary=ordinary)


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        ("weights", r"the draft model '.*' of speculative_config cannot be loaded: .*; name another one, or start"),
        ("vocabulary", r"Target and draft model should have the same vocabulary size.*=300\. Draft .*=307"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_one_clear_error(
    engines: Engines, pair: Pair, tmp_path: Path, spoiled: str, message: str
) -> None:
    engines.close()
    target, draft = pair
    copy = Path(shutil.copytree(draft, tmp_path / "draft"))
    if spoiled == "weights":
        (copy / "model.safetensors").write_bytes(b"no weights")
    else:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"vocab_size": 307}))
    with pytest.raises(ValueError, match=message):
        speculating(engines, (target, copy), 3)
    assert speculating(engines, pair, 3).generate([prompt_of(5)], beam_params(2, max_tokens=3))


def test_an_engine_that_measures_its_memory_runs_the_draft_model(engines: Engines, pair: Pair) -> None:
    engine = speculating(engines, pair, 3)
    (expected,) = run(engine, searches([(prompt_of(9), {"beam_width": 2, "max_tokens": 9})]))
    engine.runner.profile_run()
    (found,) = run(engine, searches([(prompt_of(9), {"beam_width": 2, "max_tokens": 9})]))
    assert count_differing([found], [expected]) == 0


@pytest.mark.nightly
@pytest.mark.parametrize(("width", "draft_width", "most"), [(4, 16, 2.0), (8, 16, 1.8)])
def test_a_forest_lives_within_the_means_of_its_group(
    engines: Engines, width: int, draft_width: int, most: float
) -> None:
    engine = speculating(engines, TRAINED, 3, max_num_seqs=128)
    manager, (prompt,) = engine.scheduler.kv_cache_manager, trained_prompts([8 * BLOCK_SIZE])
    peaks = {}
    for name, own in {
        "plain": {"speculation": "off"},
        "exact": {"speculation": "exact", "draft_width": draft_width},
        "sparing": {"do_sample": True, "seed": 1, "draft_width": draft_width, "memory_mode": True},
    }.items():
        manager.peak_group_blocks = 0
        (output,) = run(engine, [(prompt, beam_params(width, max_tokens=2 * BLOCK_SIZE, ignore_eos=True, **own))])
        peaks[name] = manager.peak_group_blocks
        assert name == "plain" or steps_per_forward(output) > 1.0
    assert peaks["plain"] < peaks["exact"] <= most * peaks["plain"]
    assert peaks["sparing"] < peaks["plain"]
