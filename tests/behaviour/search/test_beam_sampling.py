"""Sampled beams follow beam sampling's distribution in the engine, with and without a draft model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.distributions import PROMPT, Beam, continuations
from tests.support.engine import TRAINED_TARGET, Engine, Engines
from tests.support.models import make_draft
from tests.support.running import answers, trained_prompts
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

VOCAB = 16
SEEDS, AT_A_TIME = 1500, 50  # so that all find rows to speculate with
LENGTH = 3  # the first token is sampled after the prompt; of the others one is drafted, and one comes on top
TOP_K = 6  # of the joint distribution, so that what may come out can be enumerated
RAREST = 1e-3  # a right distribution fails with this probability, a wrong one must

Distribution = dict[tuple[Beam, Beam], float]  # of both beams, in the order of their tokens


def distribution_of(model: Path, replacement: bool, temperature: float = 1.0) -> Distribution:
    """Beam sampling of two beams, written from the rules: every pair that may come out, and its probability."""
    after = continuations(model)
    states: dict[tuple[tuple[Beam, float], ...], float] = {(((), 0.0),): 1.0}
    for _ in range(LENGTH):
        following: dict[tuple[tuple[Beam, float], ...], float] = defaultdict(float)
        for beams, chance in states.items():
            cells = [((*beam, t), score + lp) for beam, score in beams for t, lp in enumerate(after(beam))]
            cells = sorted(cells, key=lambda cell: -cell[1])[:TOP_K]
            weights = np.exp(np.array([score - cells[0][1] for _, score in cells]) / temperature)
            weights /= weights.sum()
            for (i, p), (j, q) in product(enumerate(weights), enumerate(weights)):
                if replacement or i != j:
                    following[cells[i], cells[j]] += chance * p * (q if replacement else q / (1 - p))
        states = following
    distribution: Distribution = defaultdict(float)
    for ((one, _), (other, _)), chance in states.items():
        distribution[min(one, other), max(one, other)] += chance
    return distribution


def sampled(engine: Engine, **options: Any) -> Counter[tuple[Beam, Beam]]:
    """How often which pair came out."""
    params = [
        beam_params(2, n=2, max_tokens=LENGTH, ignore_eos=True, do_sample=True, seed=seed, top_k=TOP_K, **options)
        for seed in range(SEEDS)
    ]
    outputs = []
    for start in range(0, SEEDS, AT_A_TIME):
        outputs += engine.generate([PROMPT] * AT_A_TIME, params[start : start + AT_A_TIME])
    assert options.get("speculation") == "off" or all(o.kv_transfer_params["trie_beam"]["drafted"] for o in outputs)
    pairs = (sorted(tuple(hypothesis.token_ids) for hypothesis in output.outputs) for output in outputs)
    return Counter((one, other) for one, other in pairs)


def fit(seen: Counter[tuple[Beam, Beam]], distribution: Distribution) -> float:
    """The p-value of a chi-square test; what is rare is taken together."""
    assert abs(sum(distribution.values()) - 1) < 1e-9
    if seen.keys() - distribution.keys():
        return 0.0
    expected = {pair: chance * seen.total() for pair, chance in distribution.items()}
    frequent = [pair for pair, count in expected.items() if count >= 5]
    counts = np.array([*map(seen.get, frequent, [0] * len(frequent)), 0])
    wanted = np.array([*map(expected.get, frequent), 0.0])
    counts[-1], wanted[-1] = seen.total() - counts.sum(), seen.total() - wanted.sum()
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(((counts - wanted) ** 2 / wanted).sum() / 2)))


@pytest.fixture(scope="module")
def draft(random_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(random_model("toy"), tmp_path_factory.mktemp("draft"), 0.3, seed=1)


@pytest.mark.parametrize(
    ("speculation", "replacement"),
    [
        ("off", False),
        pytest.param("off", True, marks=pytest.mark.nightly),
        pytest.param("sample", False, marks=pytest.mark.nightly),
        pytest.param("sample", True, marks=pytest.mark.nightly),
    ],
)
def test_two_sampled_beams_follow_the_distribution(
    engines: Engines, random_model: Callable[[str], Path], draft: Path, speculation: str, replacement: bool
) -> None:
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    engine = engines(random_model("toy"), speculative_config=speculative, max_num_seqs=256)
    seen = sampled(engine, speculation=speculation, replacement=replacement)
    assert fit(seen, distribution_of(random_model("toy"), replacement)) > RAREST
    # The test can tell distributions apart.
    assert fit(seen, distribution_of(random_model("toy"), not replacement)) < RAREST
    assert fit(seen, distribution_of(random_model("toy"), replacement, temperature=1.3)) < RAREST
    assert fit(seen, distribution_of(draft, replacement)) < RAREST


def test_a_greedy_request_is_searched_where_the_engine_draws(engines: Engines) -> None:
    config = {"trie_beam": {"do_sample": True, "check_invariants": True}}
    engine, prompts = engines(TRAINED_TARGET, additional_config=config), trained_prompts([30, 40])
    greedy = engine.generate(prompts, beam_params(4, n=1, max_tokens=12, temperature=0.0))
    plain = engine.generate(prompts, beam_params(4, n=1, max_tokens=12, do_sample=False))
    assert answers(greedy) == answers(plain)
    first = engine.generate(prompts, beam_params(4, n=4, max_tokens=12, seed=3))  # whose seed the engine's word allows
    again = engine.generate(prompts, beam_params(4, n=4, max_tokens=12, seed=3, do_sample=True))
    assert answers(first) == answers(again)
