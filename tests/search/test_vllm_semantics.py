"""Our steps, scores and end of the search find what `LLM.beam_search` finds when it goes on to the greatest length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.entrypoints.generate.beam_search.utils import get_beam_search_score

from tests.support.random_problems import EOS, MAX_LENGTH, NEAR_TIE, SEARCHES, TOKEN, TOLERANCE, Found, Problem, gap
from tests.support.steps import offer, rules_of, steps_of
from vllm_trie.compat.versions import own_vllm_beams
from vllm_trie.search.stopping import VllmSearchPool

penalties = st.one_of(st.sampled_from([-1.0, 0.0, 1.0, 2.0]), st.floats(-3, 3))


def vllm_search(problem: Problem, length_penalty: float, counts_prompt: bool) -> tuple[list[Found], float]:
    """A loop after vLLM's `BeamSearchOfflineMixin.beam_search`, and the closest scores it compared."""
    beams, completed, closest = [(problem.prompt, 0.0)], [], float("inf")

    def score(beam: tuple[list[int], float]) -> float:
        tokens, total = beam
        length = len(tokens) - (tokens[-1] == EOS) if counts_prompt else len(tokens) - len(problem.prompt)
        return total / max(length, 1) ** length_penalty

    for _ in range(problem.length):
        new_beams = []
        for tokens, total in beams:
            logprobs = problem.logits(tokens).log_softmax(-1).tolist()
            closest = min(closest, gap(logprobs))
            for token in sorted(range(len(logprobs)), key=lambda t: -logprobs[t])[: 2 * problem.width]:
                beam = ([*tokens, token], total + logprobs[token])
                (completed if token == EOS else new_beams).append(beam)
        closest = min(closest, gap([total for _, total in new_beams]))
        beams = sorted(new_beams, key=score, reverse=True)[: problem.width]
    completed += beams
    closest = min(closest, gap([score(beam) for beam in completed]))
    best = sorted(completed, key=score, reverse=True)[: problem.width]
    return [Found(beam[0], score(beam)) for beam in best], closest


def our_search(problem: Problem, length_penalty: float, counts_prompt: bool) -> tuple[list[Found], int]:
    """The best hypotheses, and how many steps it took to find them."""
    width = problem.width
    uneven = (len(problem.prompt), frozenset({EOS})) if counts_prompt else (0, frozenset())
    pool = VllmSearchPool(width, length_penalty, problem.length, *uneven)
    rows, scores = [problem.prompt], np.zeros(1, dtype=np.float32)
    ended: list[list[int]] = []
    for length in range(1, problem.length + 1):
        row_scores = torch.from_numpy(scores)[None]
        logits = torch.stack([problem.logits(row) for row in rows])[None]
        is_last = length == problem.length
        (step,) = steps_of(rules_of(width, "vllm", (EOS,), is_last=is_last), logits, row_scores)
        for parent, token, score in zip(*(field.tolist() for field in step.finished), strict=True):
            offer(pool, score, length, token, len(ended))
            ended.append([*rows[parent], token])
        if is_last or pool.is_done(float(step.scores.max()), length):
            break
        rows = [[*rows[parent], token] for parent, token in zip(step.parents, step.tokens.tolist(), strict=True)]
        scores = step.scores
    return [Found(ended[node], score) for score, node in zip(*map(list, pool.best(width)), strict=True)], length


@pytest.mark.parametrize("counts_prompt", [True, False], ids=["0.32", "0.33"])
@pytest.mark.parametrize("length_penalty", [-39.0, -1.0, 0.0, 1.0, 2.0])
def test_search_finds_what_vllm_finds(length_penalty: float, counts_prompt: bool) -> None:
    near_ties = ended_early = by_length = 0
    for seed in range(SEARCHES):
        problem = Problem(seed)
        theirs, closest = vllm_search(problem, length_penalty, counts_prompt)
        if closest < NEAR_TIE:
            near_ties += 1
            continue
        ours, steps = our_search(problem, length_penalty, counts_prompt)
        assert [found.tokens for found in ours] == [found.tokens for found in theirs]
        assert [found.score for found in ours] == pytest.approx([found.score for found in theirs], rel=TOLERANCE)
        ended_early += steps < problem.length
        by_length += any(found.tokens[-1] != EOS for found in ours)
    assert near_ties < SEARCHES // 10
    assert min(ended_early, by_length) > SEARCHES // 20, "hypotheses and searches must end in either way"


@settings(max_examples=70, derandomize=True)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
    st.floats(-50, 0),
    penalties,
    st.sets(st.integers(0, 9), max_size=3),
)
def test_score_is_that_of_vllm(
    prompt: list[int], generated: list[int], sum_logprobs: float, length_penalty: float, uncounted: set[int]
) -> None:
    if own_vllm_beams().counts_prompt:
        pool = VllmSearchPool(2, length_penalty, MAX_LENGTH, len(prompt), frozenset(uncounted))
        eos = generated[-1] if generated[-1] in uncounted else -1
        theirs = get_beam_search_score([*prompt, *generated], sum_logprobs, eos, length_penalty)
    else:
        pool = VllmSearchPool(2, length_penalty, MAX_LENGTH, 0, frozenset())
        theirs = get_beam_search_score(len(generated), sum_logprobs, length_penalty)
    assert pool.score(sum_logprobs, len(generated), generated[-1]) == pytest.approx(theirs, rel=1e-12)


def test_hypothesis_in_which_nothing_counts_has_a_score() -> None:
    assert VllmSearchPool(1, 1.0, MAX_LENGTH, 0, frozenset({EOS})).score(-2.0, 1, EOS) == -2.0


@settings(max_examples=70, derandomize=True)
@given(st.integers(0, 9), st.integers(1, MAX_LENGTH - 1), st.integers(1, MAX_LENGTH), st.floats(-9, -1), penalties)
def test_pool_is_settled_as_soon_as_the_best_that_can_come_is_no_better(
    prompt_length: int, length: int, held_length: int, held: float, length_penalty: float
) -> None:
    pool = VllmSearchPool(1, length_penalty, MAX_LENGTH, prompt_length, frozenset({EOS}))
    offer(pool, held, held_length, TOKEN, 0)
    best_end = (MAX_LENGTH, TOKEN) if length_penalty > 0 else (length + 1, EOS)
    equal = pool.best(1).scores[0] / pool.score(1.0, *best_end)  # the sum at which the best end has the same score
    assert pool.is_done(1.001 * equal, length)
    assert not pool.is_done(0.999 * equal, length)
    assert offer(pool, 0.999 * equal, *best_end, 1) == 0
