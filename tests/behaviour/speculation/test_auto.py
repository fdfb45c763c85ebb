"""`speculation="auto"`: the answers of plain beams, in steps that follow what pays."""

from __future__ import annotations

import pytest

from tests.support.engine import Engine, Engines
from tests.support.options import DRAFTED
from tests.support.pairs import TRAINED, count_differing, searches, sizes_in, speculating, steps_per_forward
from tests.support.running import MOST_TIES, prompt_of, run, trained_prompts
from vllm_trie.speculation.engine.adaptive_forests import AdaptiveForests
from vllm_trie.speculation.search.forest_size import PLAIN, ForestSize

pytestmark = pytest.mark.slow

LAYERS, WIDTH, TOKENS = 3, 3, 24


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return speculating(engines, TRAINED, LAYERS, max_num_seqs=64)


def test_answers_are_those_of_plain_beams_whatever_is_chosen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = PLAIN, ForestSize(LAYERS, 2 * WIDTH), ForestSize(1, 4 * WIDTH), PLAIN, ForestSize(2, WIDTH)
    chosen = sizes_in(monkeypatch, *sizes)
    prompts = trained_prompts([30 + number for number in range(len(DRAFTED))])
    defaults = {"beam_width": WIDTH, "max_tokens": TOKENS}
    asked = [(prompt, defaults | options) for prompt, options in zip(prompts, DRAFTED, strict=True)]
    plain = run(engine, searches(asked, "off"))
    assert not chosen
    outputs = run(engine, searches(asked, "auto"))
    assert count_differing(outputs, plain) <= MOST_TIES * sum(len(output.outputs) for output in plain)
    assert len(chosen) > 10 * len(sizes)


def test_it_is_what_an_engine_with_a_draft_model_does(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = sizes_in(monkeypatch, ForestSize(LAYERS, 2 * WIDTH))
    asked = [(trained_prompts([40])[0], {"beam_width": WIDTH, "max_tokens": TOKENS})]
    (said,) = run(engine, searches(asked, None))
    assert chosen
    assert steps_per_forward(said) > 1.2
    chosen.clear()
    run(engine, searches([(asked[0][0], asked[0][1] | {"do_sample": True, "seed": 1})], None))
    assert not chosen, "forests that are sampled have the size that was asked for"


def test_a_group_rests_between_forests(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = sizes_in(monkeypatch, PLAIN)
    (output,) = run(
        engine, searches([(prompt_of(9, 1), {"beam_width": WIDTH, "max_tokens": 20, "ignore_eos": True})], "auto")
    )
    assert steps_per_forward(output) == 1.0
    assert 8 <= len(chosen) <= 10, "a choice for every other step"


def test_what_steps_cost_decides(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = engine.scheduler._budgets
    (asked,) = [(prompt, {"beam_width": 4, "max_tokens": 64, "ignore_eos": True}) for prompt in trained_prompts([40])]

    def per_forward(verifying: float) -> float:
        """Steps per forward, where a step that verifies takes this many plain ones."""
        adaptive = AdaptiveForests(LAYERS)
        monkeypatch.setattr(budgets, "adaptive", adaptive)
        for cost, seconds in ((adaptive._costs.plain, 1.0), (adaptive._costs.verifying, verifying)):
            monkeypatch.setattr(cost, "expected", lambda *_, seconds=seconds: seconds)
            monkeypatch.setattr(cost, "count", 2)
        monkeypatch.setattr(adaptive._costs.drafting, "expected", lambda *_: 0.0)
        (output,) = run(engine, searches([asked], "auto"))
        return steps_per_forward(output)

    assert per_forward(1.0) > 2.0, "forests cost nothing: the largest are best"
    assert per_forward(5.0) == 1.0, "no forest leads to five steps"
