"""What is sampled follows the seed and the options, and is reported as the target's own, whatever happens meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import Engine
from tests.support.reference import SCORE_TOLERANCE
from tests.support.running import run
from tests.support.trained_pair import (
    LENGTH,
    SAMPLED,
    WARPED,
    WIDTH,
    answer,
    counts,
    own_sum,
    rows_of,
    search,
    tokens,
)
from vllm_trie import beam_params
from vllm_trie.engine.group import BeamGroup

pytestmark = pytest.mark.slow


def test_replacement_lets_the_same_beam_be_sampled_twice(engine: Engine, prompts: list[list[int]]) -> None:
    for mode in (SAMPLED, {"do_sample": True, "speculation": "off", "seed": 1}):
        (once,) = tokens(search(engine, prompts[:1], top_k=1, **mode))
        assert (len(once[0]), once[1:]) == (LENGTH, [()] * (WIDTH - 1)), "there is only one to be sampled"
        assert tokens(search(engine, prompts[:1], top_k=1, replacement=True, **mode)) == [[once[0]] * WIDTH]


@pytest.mark.nightly
def test_a_threshold_lets_layers_be_narrower_but_not_below_the_least_width(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers: list[tuple[int, int]] = []  # beams of each step, and those of its hypotheses that ended
    stock = BeamGroup.advance

    def advance(self: BeamGroup, step: Any) -> bool:
        layers.append((step.num_beams, len(step.finished.tokens)))
        return stock(self, step)

    monkeypatch.setattr(BeamGroup, "advance", advance)
    mean_widths = []
    for min_width in (None, 2, 3, WIDTH):
        layers.clear()
        outputs = search(engine, prompts, threshold=0.8, min_width=min_width, ignore_eos=False, **SAMPLED)
        assert all(living + ended >= (min_width or 1) for living, ended in layers)
        assert sum(counts(output)["beams"] for output in outputs) == sum(living for living, _ in layers)
        steps = sum(counts(output)["steps"] for output in outputs)
        mean_widths.append(sum(living for living, _ in layers) / steps)
    assert mean_widths == sorted(mean_widths)
    assert mean_widths[0] < mean_widths[1] < WIDTH
    assert min(living + ended for living, ended in layers) == WIDTH, "min_width=beam_width leaves no choice"
    more = [counts(search(engine, prompts[:1], threshold=t, **SAMPLED)[0])["mean_width"] for t in (0.99, 0.3)]
    assert more[0] < more[1]


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(SAMPLED, marks=pytest.mark.nightly),
        SAMPLED | {"replacement": True} | WARPED,
        {"do_sample": True, "speculation": "off"} | WARPED,
    ],
)
def test_a_seed_decides_what_is_sampled(engine: Engine, prompts: list[list[int]], mode: dict) -> None:
    prompts, mode = prompts[:2], mode | {"max_tokens": LENGTH // 2}
    first, again, other = (tokens(search(engine, prompts, **mode | {"seed": seed})) for seed in (5, 5, 6))
    assert first == again
    assert all(one != another for one, another in zip(first, other, strict=True))
    unseeded = [tokens(search(engine, prompts, **mode | {"seed": None})) for _ in range(2)]
    assert all(one != another for one, another in zip(*unseeded, strict=True))
    same_prompt = tokens(search(engine, [prompts[0]] * 2, **mode | {"seed": None}))
    assert same_prompt[0] != same_prompt[1]


@pytest.mark.parametrize(
    "mode",
    [
        {"speculation": "exact"},
        SAMPLED,
        SAMPLED | WARPED,
        SAMPLED | WARPED | {"replacement": True, "threshold": 0.7},
        SAMPLED | {"memory_mode": True},
        {"speculation": "off", "do_sample": True, "seed": 1} | WARPED,
    ],
    ids=["exact", "sample", "warped", "narrower", "one beam", "plain"],
)
def test_cumulative_logprob_is_the_targets_own_sum(engine: Engine, prompts: list[list[int]], mode: dict) -> None:
    """At temperature 1, before any filter, whatever other groups take the same step."""
    params = [beam_params(w, n=w, max_tokens=LENGTH, **mode) for w in (WIDTH, 1, 7, 5)]
    outputs = run(engine, list(zip(prompts, params, strict=True)))
    num_checked = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        for generated, total in answer(output):
            if total is not None:
                assert total == pytest.approx(own_sum(prompt, generated), abs=SCORE_TOLERANCE * len(generated))
                num_checked += 1
    assert num_checked >= len(params)  # narrow layers may finish no more than one hypothesis of a search


@pytest.mark.parametrize(
    "mode", [SAMPLED, {"speculation": "off", "do_sample": True, "seed": 1}], ids=["sample", "plain"]
)
def test_logprobs_report_each_sampled_token_and_its_rank(engine: Engine, prompts: list[list[int]], mode: dict) -> None:
    ranks = []
    for prompt, output in zip(prompts, search(engine, prompts, logprobs=2, **mode), strict=True):
        for o in output.outputs:
            rows = rows_of(prompt, tuple(o.token_ids))
            for token, reported, row in zip(o.token_ids, o.logprobs, rows, strict=True):
                best = row.topk(2).indices.tolist()
                assert reported.keys() == {token, *best}
                for one, entry in reported.items():
                    assert entry.logprob == pytest.approx(row[one].item(), abs=SCORE_TOLERANCE)
                    assert entry.rank == (row > row[one]).sum().item() + 1
                ranks.append(reported[token].rank)
            own = sum(reported[token].logprob for token, reported in zip(o.token_ids, o.logprobs, strict=True))
            assert o.cumulative_logprob == pytest.approx(own, abs=SCORE_TOLERANCE)
    assert max(ranks) > 2 * WIDTH, "something must be sampled that no search would rank"
    (without,) = search(engine, prompts[:1], **mode)
    assert tokens([without]) == tokens(search(engine, prompts[:1], logprobs=2, **mode)), "reports change no sample"
