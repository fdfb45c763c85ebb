"""Stochastic beam search draws whole hypotheses, without replacement, by the probabilities of the model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from tests.support.distributions import PROMPT, continuations
from tests.support.disturb import Unlucky
from tests.support.engine import Engine, Engines
from tests.support.running import BYTES_PER_BLOCK, prompt_of, run
from vllm_trie import beam_params, hypotheses

pytestmark = pytest.mark.slow

SEEDS, AT_A_TIME = 1200, 60
WIDTH, LENGTH = 3, 3
KEPT = 4  # tokens that each row may continue with, so that all sequences can be enumerated
RAREST = 1e-3  # a right distribution fails with this probability, a wrong one must

Sequence = tuple[int, ...]


def sequences_of(model: Path, stops: tuple[int, ...], temperature: float) -> dict[Sequence, float]:
    """All sequences of at most `LENGTH` tokens and their probabilities, where `KEPT` tokens may come at a time."""
    after, found, running = continuations(model), {}, {(): 1.0}
    for _ in range(LENGTH):
        following = {}
        for sequence, chance in running.items():
            logprobs = after(sequence) / temperature
            best = np.argsort(-logprobs)[:KEPT]
            shares = np.exp(logprobs[best] - logprobs[best[0]])
            for token, share in zip(best.tolist(), shares / shares.sum(), strict=True):
                ended = found if token in stops else following
                ended[(*sequence, token)] = chance * share
        running = following
    return found | running


def p_value(seen: Mapping[Hashable, int], chances: Mapping[Hashable, float]) -> float:
    """Of a chi-square test; what is rare is taken together."""
    assert sum(chances.values()) == pytest.approx(1)
    if seen.keys() - chances.keys():
        return 0.0
    total = sum(seen.values())
    frequent = [one for one, chance in chances.items() if chance * total >= 5]
    counts, expected = [seen.get(one, 0) for one in frequent], [chances[one] * total for one in frequent]
    rare = total - sum(expected)
    if rare > 0.5:
        counts, expected = [*counts, total - sum(counts)], [*expected, rare]
    expected = [value * sum(counts) / sum(expected) for value in expected]
    return float(chisquare(counts, expected).pvalue)


def sampled(engine: Engine, **options: Any) -> list[list[Sequence]]:
    """What each seed draws, in order."""
    options = {"max_tokens": LENGTH, "ignore_eos": True, "top_k": KEPT, "do_sample": True} | options
    params = [beam_params(WIDTH, n=WIDTH, seed=seed, **options) for seed in range(SEEDS)]
    found = []
    for start in range(0, SEEDS, AT_A_TIME):
        outputs = engine.generate([PROMPT] * AT_A_TIME, params[start : start + AT_A_TIME])
        found += [[tuple(hypothesis.token_ids) for hypothesis in output.outputs] for output in outputs]
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(("is_async", "temperature"), [(False, 1.0), (True, 2.0)])
def test_hypotheses_are_sampled_one_after_the_other_without_replacement(
    engines: Engines, random_model: Callable[[str], Path], is_async: bool, temperature: float
) -> None:
    model = random_model("toy")
    stops = (int(continuations(model)(()).argmax()),)  # some hypotheses are short
    engine = engines(model, max_num_seqs=256, async_scheduling=is_async)
    more = {"stop_token_ids": [*stops], "temperature": temperature}
    found, chances = sampled(engine, stochastic=True, **more), sequences_of(model, stops, temperature)
    assert all(len({*of_seed}) == WIDTH for of_seed in found)
    assert len({len(sequence) for of_seed in found for sequence in of_seed}) > 1

    firsts = Counter(of_seed[0] for of_seed in found)
    seconds, first_two = defaultdict[Sequence, float](float), defaultdict[Any, float](float)
    for one, p in chances.items():
        for other, q in chances.items():
            if one != other:
                seconds[other] += p * q / (1 - p)
                first_two[one, other] += p * q / (1 - p)
    assert p_value(firsts, chances) > RAREST
    assert p_value(Counter(of_seed[1] for of_seed in found), seconds) > RAREST
    assert p_value(Counter((of_seed[0], of_seed[1]) for of_seed in found), first_two) > RAREST
    # The test can tell distributions apart: another temperature, draws with replacement, beam sampling.
    assert p_value(firsts, sequences_of(model, stops, 1.4 * temperature)) < RAREST
    assert p_value(Counter(of_seed[1] for of_seed in found), chances) < RAREST
    by_steps = sampled(engine, **more)
    assert p_value(Counter(frozenset(of_seed[:2]) for of_seed in by_steps), unordered(first_two)) < RAREST


def unordered(pairs: Mapping[Any, float]) -> dict[Any, float]:
    chances = defaultdict[Any, float](float)
    for (one, other), chance in pairs.items():
        chances[frozenset((one, other))] += chance
    return chances


def test_what_is_reported_is_the_log_probability_that_a_hypothesis_was_sampled_by(
    engines: Engines, random_model: Callable[[str], Path]
) -> None:
    model = random_model("toy")
    chances, options = sequences_of(model, (), 1.5), {"max_tokens": LENGTH, "ignore_eos": True, "top_k": KEPT}
    options |= {"do_sample": True, "stochastic": True, "temperature": 1.5, "seed": 3}
    for logprobs in (None, 2):
        (output,) = engines(model).generate([PROMPT], beam_params(8, n=8, logprobs=logprobs, **options))
        for hypothesis in output.outputs:
            expected = np.log(chances[tuple(hypothesis.token_ids)])
            assert hypothesis.cumulative_logprob == pytest.approx(expected, abs=1e-4)
    (output,) = engines(model).generate([PROMPT], beam_params(8, compact=True, **options))
    scores = hypotheses(output).scores
    assert (scores[:-1] >= scores[1:]).all(), "the first sampled has the greatest score after noise"


def test_all_there_is_comes_back_once(engines: Engines, random_model: Callable[[str], Path]) -> None:
    model, options = random_model("toy"), {"do_sample": True, "stochastic": True, "ignore_eos": True, "top_k": 2}
    (output,) = engines(model).generate([PROMPT], beam_params(9, n=9, max_tokens=3, seed=1, **options))
    found = [tuple(o.token_ids) for o in output.outputs if o.token_ids]
    assert len(found) == len({*found}) == 8
    assert output.outputs[8].stop_reason == "no further hypothesis"


def test_what_is_sampled_depends_on_the_seed_alone(engines: Engines, random_model: Callable[[str], Path]) -> None:
    """Neither on what else is in its batch, nor on preemptions."""
    engine = engines(random_model("gqa"), kv_cache_memory_bytes=60 * BYTES_PER_BLOCK, max_num_seqs=40)
    options = {"do_sample": True, "stochastic": True, "max_tokens": 24, "ignore_eos": True}
    jobs = [(prompt_of(30, seed), beam_params(5, n=5, seed=seed, **options)) for seed in range(6)]
    alone = [run(engine, [job])[0] for job in jobs]
    unlucky = Unlucky(engine, share=0.5)
    together = run(engine, jobs, unlucky.preempt_the_last)
    assert unlucky.num_preempted > 3
    for one, other in zip(alone, together, strict=True):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]
