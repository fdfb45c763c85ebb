"""Our steps, scores and end of the search find what a loop over the trie paper's rules finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.random_problems import EOS, NEAR_TIE, SEARCHES, TOLERANCE, Found, Problem, gap
from tests.support.steps import offer, rules_of, steps_of
from vllm_trie.search.stopping import TridecodeSearchPool


def tridecode_search(problem: Problem, length_penalty: float) -> tuple[list[Found], int, float]:
    """What is found, after how many steps, and the closest scores compared. SPEC's column, rule by rule."""
    width = problem.width
    beams, finished, closest = [(problem.prompt, 0.0)], [], float("inf")
    for length in range(1, problem.length + 1):
        was_full = len(finished) >= width
        children = []
        for tokens, total in beams:
            logprobs = problem.logits(tokens).double().log_softmax(-1).tolist()
            children += [([*tokens, token], total + logprob) for token, logprob in enumerate(logprobs)]
        children.sort(key=lambda child: -child[1])
        closest = min(closest, gap([total for _, total in children[: 3 * width]]))
        beams = []
        for tokens, total in children:
            if len(beams) == width:
                break
            if tokens[-1] == EOS and length > 1:
                finished.append(Found(tokens, total / length**length_penalty))
            else:
                beams.append((tokens, total))
        if length == problem.length:
            finished += [Found(tokens, total / length**length_penalty) for tokens, total in beams]
        elif was_full:
            break
    closest = min(closest, gap([found.score for found in finished]))
    return sorted(finished, key=lambda found: -found.score)[:width], length, closest


def our_search(problem: Problem, length_penalty: float) -> tuple[list[Found], int]:
    """The best hypotheses, and how many steps it took to find them."""
    width = problem.width
    pool = TridecodeSearchPool(width, length_penalty, problem.length)
    rows, scores, ended = [problem.prompt], np.zeros(1, dtype=np.float32), []
    for length in range(1, problem.length + 1):
        logits = torch.stack([problem.logits(row) for row in rows])[None]
        rules = rules_of(width, "tridecode", (EOS,) if length > 1 else (), is_last=length == problem.length)
        (step,) = steps_of(rules, logits, torch.from_numpy(scores)[None])
        for parent, token, score in zip(*(field.tolist() for field in step.finished), strict=True):
            offer(pool, score, length, token, len(ended))
            ended.append([*rows[parent], token])
        if pool.is_done(float(step.scores.max()), length):
            break
        rows = [[*rows[parent], token] for parent, token in zip(step.parents, step.tokens.tolist(), strict=True)]
        scores = step.scores
    return [Found(ended[node], score) for score, node in zip(*map(list, pool.best(width)), strict=True)], length


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_search_finds_what_the_loop_finds(length_penalty: float) -> None:
    near_ties = ended_early = began_with_eos = 0
    for seed in range(SEARCHES):
        problem = Problem(seed)
        theirs, their_steps, closest = tridecode_search(problem, length_penalty)
        if closest < NEAR_TIE:
            near_ties += 1
            continue
        ours, steps = our_search(problem, length_penalty)
        assert steps == their_steps
        assert [found.tokens for found in ours] == [found.tokens for found in theirs]
        assert [found.score for found in ours] == pytest.approx([found.score for found in theirs], rel=TOLERANCE)
        ended_early += steps < problem.length
        began_with_eos += any(found.tokens[len(problem.prompt)] == EOS for found in ours)
    assert near_ties < SEARCHES // 5
    assert min(ended_early, began_with_eos) > SEARCHES // 20, "the rules that set it apart must come into play"


def test_search_goes_on_for_one_step_after_the_pool_is_full() -> None:
    pool = TridecodeSearchPool(2, 1.0, 9)
    offer(pool, -1.0, 3, EOS, 0)
    assert not pool.is_done(-5.0, 3)
    offer(pool, -2.0, 4, EOS, 1)
    assert not pool.is_done(-5.0, 4)
    assert offer(pool, -0.5, 5, EOS, 2) == 1
    assert pool.is_done(-5.0, 5)
