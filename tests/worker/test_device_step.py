"""A step on the device decides what the search's own rules decide, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_trie.messages import SelectRules
from vllm_trie.search.ranking import rank_candidates
from vllm_trie.search.step import Step, hf_step, num_candidates
from vllm_trie.search.warping import Warping, log_probabilities
from vllm_trie.worker.device_step import from_keys, order_keys, settle, take_step, unpacked

DEAD = float("-inf")


def device_step(total: torch.Tensor, stop_token_ids: list[int], width: int, is_last: bool) -> Step:
    """Of continuations with cumulative log-probabilities `total`, [G, r, V]."""
    _, num_rows, vocab_size = total.shape
    keys = order_keys(total)
    count = min(num_candidates(width, len(stop_token_ids)), keys.shape[1])
    ranked = keys.topk(count, dim=1).values
    stops = torch.tensor(stop_token_ids, dtype=torch.int64)
    return unpacked(settle(ranked, num_rows, vocab_size, stops, width, is_last).numpy())


def by_definition(total: np.ndarray, stop_token_ids: list[int], width: int, is_last: bool) -> tuple[list, list]:
    """What each slot, and each of the best `width` candidates that finishes, must be, of one group, [r, V]."""
    num_rows = len(total)
    ranked = sorted((-total[cell], *cell) for cell in np.ndindex(total.shape))
    ranked = ranked[: num_candidates(width, len(stop_token_ids))]
    living = [(p, t, -score) for score, p, t in ranked if t not in stop_token_ids and -score > DEAD][:width]
    slots: list = [None] * width
    others = []
    for parent, token, score in living:
        if slots[parent] is None:
            slots[parent] = (parent, token, score)
        else:
            others.append((parent, token, score))
    for slot in range(width):
        if slots[slot] is None:
            slots[slot] = others.pop(0) if others else (min(slot, num_rows - 1), 0, DEAD)
    finished = [(p, t, -s) for s, p, t in ranked[:width] if (is_last or t in stop_token_ids) and -s > DEAD]
    return slots, finished


def slots_of(step: Step) -> list[list]:
    """By group, what each slot is."""
    fields = (field.tolist() for field in (step.parents, step.tokens, step.scores))
    return [list(zip(*of_group, strict=True)) for of_group in zip(*fields, strict=True)]


def finished_of(step: Step) -> list[list]:
    """By group, what finishes."""
    groups = (step.group(at).finished for at in range(len(step.parents)))
    return [list(zip(*(field.tolist() for field in finished), strict=True)) for finished in groups]


@st.composite
def continuations(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], int, bool]:
    """Scores with many ties, dead continuations and signed zeros, of groups down to a vocabulary of one token."""
    width = draw(st.integers(1, 12))
    num_groups, num_rows = draw(st.integers(1, 3)), draw(st.sampled_from([1, width]))
    vocab_size = draw(st.integers(1, 12))
    levels = draw(st.lists(st.sampled_from([DEAD, -7.5, -2.0, -1.0, -0.5, -0.0, 0.0]), min_size=1, max_size=5))
    seed = draw(st.integers(0, 2**31))
    cells = np.random.default_rng(seed).choice(np.float32(levels), size=(num_groups, num_rows, vocab_size))
    stops = draw(st.lists(st.integers(0, vocab_size - 1), max_size=3, unique=True))
    return torch.from_numpy(cells), stops, width, draw(st.booleans())


@given(continuations())
@settings(max_examples=500, deadline=None)
def test_step_is_the_search_by_definition(case: tuple[torch.Tensor, list[int], int, bool]) -> None:
    total, *rules = case
    step = device_step(total, *rules)
    expected = [by_definition(of_group, *rules) for of_group in total.numpy()]
    assert slots_of(step) == [slots for slots, _ in expected]
    assert finished_of(step) == [finished for _, finished in expected]


@given(continuations())
@settings(max_examples=500, deadline=None)
def test_step_is_the_host_step_wherever_all_beams_live(case: tuple[torch.Tensor, list[int], int, bool]) -> None:
    total, stop_token_ids, width, is_last = case
    count = min(num_candidates(width, len(stop_token_ids)), total[0].numel())
    if count < width:
        return
    candidates = rank_candidates(total, torch.zeros(total.shape[:2]), count).candidates
    host = hf_step(candidates, np.isin(candidates.tokens, stop_token_ids), width, is_last)
    step = device_step(total, stop_token_ids, width, is_last)
    for own, theirs in zip(slots_of(step), slots_of(host), strict=True):
        if all(score > DEAD for *_, score in theirs):
            assert own == theirs
        else:  # the host also gives slots to what does not live
            alive = [sorted(beam for beam in of_group if beam[2] > DEAD) for of_group in (own, theirs)]
            assert alive[0] == alive[1]
    meant = [[beam for beam in of_group if beam[2] > DEAD] for of_group in finished_of(host)]
    assert finished_of(step) == meant


def test_no_row_is_both_source_and_destination() -> None:
    for seed in range(50):
        total = torch.randn(4, 16, 9, generator=torch.Generator().manual_seed(seed))
        parents = device_step(total, [3], 16, False).parents
        for of_group in parents:
            destinations = {slot for slot, parent in enumerate(of_group) if slot != parent}
            assert not destinations & set(of_group.tolist())


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("masks_stops", [True, False])
def test_step_from_logits_is_the_host_step(first: bool, masks_stops: bool) -> None:
    width, vocab_size, num_groups, stops = 6, 211, 3, (5, 17)
    random = torch.Generator().manual_seed(7)
    num_rows = 1 if first else width
    logits = torch.randn(40, vocab_size, generator=random).mul(2).bfloat16()  # coarse: many ties
    places = torch.randperm(40, generator=random)[: num_groups * num_rows].view(num_groups, num_rows)
    scores = torch.randn(num_groups, num_rows, generator=random).mul(3)
    warping = Warping(temperature=0.7)
    rules = SelectRules(width, "hf", stops, (), True, None, False, warping, masks_stops=masks_stops)
    taken = take_step(rules, logits, places, scores, torch.tensor(stops))
    logprobs = log_probabilities(logits[places], stops if masks_stops else (), 0.7)
    candidates = rank_candidates(logprobs, scores, num_candidates(width, 2)).candidates
    host = hf_step(candidates, np.isin(candidates.tokens, stops), width, False)
    assert slots_of(unpacked(taken.packed.numpy())) == slots_of(host)
    assert finished_of(unpacked(taken.packed.numpy())) == finished_of(host)


def test_row_that_may_take_no_token_has_no_child() -> None:
    logits = torch.zeros(2, 8)
    logits[0] = DEAD
    rules = SelectRules(2, "hf", (), (), True, None, True)
    taken = take_step(rules, logits, torch.tensor([[0, 1]]), torch.tensor([[0.0, -5.0]]), torch.tensor([]).long())
    assert taken.parents.tolist() == [[1, 1]]
    assert torch.isfinite(taken.scores).all()


def test_keys_keep_index_and_score() -> None:
    total = torch.tensor([[[-1.5, DEAD, 0.0], [-1e-30, -1e30, -0.0]]])
    index, scores = from_keys(order_keys(total))
    assert index.tolist() == [list(range(6))]
    assert torch.equal(scores, total.flatten(1))
