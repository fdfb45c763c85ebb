"""What a grammar leaves of a row: masks, with shortcuts and without, and what may be taken under each semantics."""

from __future__ import annotations

import pytest
import torch

from tests.support.steps import rules_of, shortcuts, steps_of
from vllm_trie.search.constraints.grammar import GrammarConstraint, unpacked_constraint_mask
from vllm_trie.search.constraints.ngrams import NGramConstraint

NEVER = float("-inf")
GROUPS, ROWS, VOCAB_SIZE, WIDTH = 3, 4, 77, 4  # no whole number of words
BOTH = pytest.mark.parametrize("looks", [True, False])


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(GROUPS, ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def may_come() -> torch.Tensor:
    """Each row may take a few tokens, some one, some none."""
    may_come = torch.rand(GROUPS, ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(2)) < 0.1
    may_come[0, 1] = may_come[2] = False
    may_come[1, 3, 1:] = False
    return may_come


SCORES = -torch.arange(GROUPS * ROWS, dtype=torch.float32).view(GROUPS, ROWS) / 3


@BOTH
def test_a_mask_has_the_lowest_token_in_the_lowest_bit(may_come: torch.Tensor, looks: bool) -> None:
    words = [
        [sum(1 << (t % 32) for t in row.nonzero()[:, 0].tolist() if t // 32 == w) for w in range(3)]
        for row in may_come[0]
    ]
    bits = torch.tensor(words).to(torch.int32)[None]
    with shortcuts(looks):
        assert torch.equal(unpacked_constraint_mask(bits, VOCAB_SIZE), may_come[:1])


@BOTH
@pytest.mark.parametrize("semantics", ["hf", "tridecode"])
def test_log_probabilities_are_those_of_a_model_that_knows_nothing_else(
    logits: torch.Tensor, may_come: torch.Tensor, semantics: str, looks: bool
) -> None:
    rules, before = rules_of(WIDTH, semantics, (5,)), logits.clone()
    banned = logits.masked_fill(~may_come, NEVER)
    with shortcuts(looks):
        found = steps_of(rules, logits, SCORES, (GrammarConstraint(), may_come))
        expected = steps_of(rules._replace(is_controlled=True), banned, SCORES)
    assert torch.equal(logits, before)
    for step, other in zip(found, expected, strict=True):
        for field, same in zip(step[:3], other[:3], strict=True):
            assert field.tolist() == same.tolist()
    assert [step.num_beams for step in found] == [WIDTH, WIDTH, 0]
    assert 1 not in found[0].parents[found[0].scores > NEVER]


def test_vllms_loop_sees_the_best_of_a_row_or_the_best_that_is_allowed(
    logits: torch.Tensor, may_come: torch.Tensor
) -> None:
    logprobs = logits.log_softmax(-1)
    found = GrammarConstraint(2 * WIDTH).narrow(logprobs, may_come)
    for row, allowed, left in zip(*(t.flatten(0, 1) for t in (logprobs, may_come, found)), strict=True):
        best = {*row.topk(2 * WIDTH).indices.tolist()} & {*allowed.nonzero()[:, 0].tolist()}
        if not best and allowed.any():
            best = {int(row.masked_fill(~allowed, NEVER).argmax())}
        assert {*(left > NEVER).nonzero()[:, 0].tolist()} == best
        assert all(left[token] == row[token] for token in best)


@BOTH
def test_under_vllms_semantics_scores_and_reports_are_the_models_own(
    logits: torch.Tensor, may_come: torch.Tensor, looks: bool
) -> None:
    rules = rules_of(WIDTH, "vllm", (5,), num_logprobs=3)
    with shortcuts(looks):
        found = steps_of(rules, logits, SCORES, (GrammarConstraint(2 * WIDTH), may_come))
    logprobs = logits.log_softmax(-1)
    for group, step in enumerate(found):
        assert step.top_logprobs is not None
        assert step.top_logprobs.tokens.tolist() == logprobs[group].topk(3).indices.tolist()
        for parent, token, score in zip(step.parents, step.tokens, step.scores, strict=True):
            if score > NEVER:
                assert may_come[group, parent, token]
                assert score == pytest.approx(float(SCORES[group, parent] + logprobs[group, parent, token]), abs=1e-5)
    assert found[2].num_beams == 0


@BOTH
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("semantics", ["hf", "vllm"])
def test_beside_a_grammar_nothing_repeats_an_ngram(
    logits: torch.Tensor, may_come: torch.Tensor, semantics: str, size: int, looks: bool
) -> None:
    """The first row of the second group may take one token, which would repeat an n-gram, and so takes none."""
    seeded = torch.Generator().manual_seed(3)
    histories = torch.randint(VOCAB_SIZE // 7, (GROUPS, ROWS, 30), generator=seeded)
    may_come[1, 0] = torch.arange(VOCAB_SIZE) == 40
    histories[1, 0, 0], histories[1, 0, 1], histories[1, 0, -1] = 50, 40, 50
    num_seen = None if semantics == "hf" else 2 * WIDTH
    grammar, repeats = (GrammarConstraint(num_seen), may_come), (NGramConstraint(size), histories)
    with shortcuts(looks):
        found = steps_of(rules_of(WIDTH, semantics), logits, SCORES, grammar, repeats)
        free = steps_of(rules_of(WIDTH, semantics), logits, SCORES, grammar)
    assert 0 in free[1].parents[free[1].scores > NEVER]
    assert 0 not in found[1].parents[found[1].scores > NEVER]
    num_banned = 0
    for group, step in enumerate(found):
        expected = []
        for row in range(ROWS):
            history, allowed = histories[group, row].tolist(), {*may_come[group, row].nonzero()[:, 0].tolist()}
            is_known = may_come[group, row] if num_seen is None else torch.ones(VOCAB_SIZE, dtype=torch.bool)
            ngrams = [history[at : at + size] for at in range(len(history) - size + 1)]
            newest = history[len(history) - size + 1 :]
            left = [token for token in range(VOCAB_SIZE) if [*newest, token] not in ngrams]
            logprobs = logits[group, row].where(is_known, NEVER).log_softmax(-1).tolist()
            best_first = sorted(left, key=lambda token: -logprobs[token])
            ways = [token for token in best_first[:num_seen] if token in allowed]
            ways = ways or [token for token in best_first if token in allowed][:1]
            expected += [(float(SCORES[group, row]) + logprobs[token], row, token) for token in ways]
            num_banned += len(allowed - {*left})
        expected = sorted(expected, reverse=True)[:WIDTH]
        lives = zip(step.scores.tolist(), step.parents.tolist(), step.tokens.tolist(), strict=True)
        beams = sorted((beam for beam in lives if beam[0] > NEVER), reverse=True)
        assert [beam[1:] for beam in beams] == [beam[1:] for beam in expected]
        assert [beam[0] for beam in beams] == pytest.approx([beam[0] for beam in expected], abs=1e-5)
    assert num_banned > 1
