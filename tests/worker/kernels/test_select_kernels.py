"""The kernel that selects the next beams does what its reference in torch does: on a GPU, or interpreted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.steps import rules_of
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.rank import NO_KEY, SCORE_UNIT, SearchCandidates, choose_next_search_beams
from vllm_trie.search.rules import SearchInputs
from vllm_trie.search.step import take_packed_search_step
from vllm_trie.worker.kernels import decide, slots
from vllm_trie.worker.kernels.tiles import KernelRanking

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEAD = float("-inf")


def check(num_groups: int, width: int, num_rows: int, count: int, alive: float, seed: int) -> None:
    """Raise AssertionError unless the kernel selects, of random candidates, what torch selects, to the bit."""
    random = torch.Generator().manual_seed(seed)
    shape = (num_groups, count)
    parents = torch.randint(num_rows, shape, generator=random).to(DEVICE)
    tokens = torch.randint(1 << 17, shape, generator=random).to(DEVICE)
    scores = -torch.rand(shape, generator=random).to(DEVICE)
    lives = (torch.rand(shape, generator=random) < alive).to(DEVICE)
    candidates = SearchCandidates(parents, tokens, scores)
    by_kernel, by_torch = (
        select(candidates, lives, width, num_rows) for select in (slots.launch_select_next, choose_next_search_beams)
    )
    for own, expected in zip(by_kernel, by_torch, strict=True):
        assert own.dtype == expected.dtype
        assert torch.equal(own, expected)


@settings(max_examples=75, derandomize=True)
@given(
    st.integers(1, 3),
    st.integers(1, 20),
    st.booleans(),
    st.integers(1, 50),
    st.sampled_from([0.0, 0.2, 0.7, 1.0]),
    st.integers(0, 1 << 31),
)
def test_kernel_selects_as_torch(
    num_groups: int, width: int, is_first: bool, count: int, alive: float, seed: int
) -> None:
    check(num_groups, width, 1 if is_first else width, count, alive, seed)


@settings(max_examples=15, derandomize=True, phases=[Phase.generate])
@given(st.integers(1, 2), st.integers(1, 9), st.booleans(), st.integers(1, 30), st.integers(0, 1 << 31))
def test_kernels_for_many_beams_select_as_torch(
    num_groups: int, width: int, is_first: bool, count: int, seed: int
) -> None:
    """Of keys in order, of which the last have no score."""
    random, vocab_size, num_rows = torch.Generator().manual_seed(seed), 40, 1 if is_first else width
    scores = torch.rand(num_groups, count, generator=random).sort(dim=1).values.neg()
    scores[0, -(seed % 4) or count :] = DEAD
    parents = torch.randint(num_rows, scores.shape, generator=random)
    tokens = torch.randint(vocab_size, scores.shape, generator=random)
    keys = scores.abs().view(torch.int32).long() * SCORE_UNIT + parents * vocab_size + tokens
    both, candidates = torch.stack([keys, torch.full_like(keys, NO_KEY)]), SearchCandidates(parents, tokens, scores)
    places = torch.arange(num_groups * num_rows, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decide, "PART", 4)
        patch.setattr(decide, "SLOTS_AT_A_TIME", 2)
        patch.setattr(decide, "CHILDREN_AT_A_TIME", 4)
        rules, ranking = rules_of(width), KernelRanking(launch=lambda *_: NotImplemented, num_places=vocab_size)
        decision = decide.KernelDecision(rules, num_rows, rules.layout(num_rows, vocab_size), ranking)
        taken = decision(both.to(DEVICE), places, places[:, None].clone())
    expected = choose_next_search_beams(candidates, scores > DEAD, width, num_rows)
    has_beam = expected.scores > DEAD
    assert torch.equal(taken.going.beams.scores.cpu(), expected.scores)
    assert torch.equal(taken.going.parents.cpu(), expected.parents)
    assert torch.equal(taken.going.tokens.cpu()[has_beam], expected.tokens[has_beam])


@pytest.mark.parametrize("width", [33, 64, 200, 512, 1024, 5000])
@pytest.mark.parametrize("alive", [0.3, 1.0])
def test_wide_groups_are_selected_as_in_torch(width: int, alive: float) -> None:
    for num_rows in (1, width):
        check(1, width, num_rows, 2 * width, alive, seed=width)


def test_parts_of_larger_tensors_are_selected_as_in_torch() -> None:
    parents = torch.arange(24, device=DEVICE).view(2, 12) % 4
    candidates = SearchCandidates(parents[:, ::2], parents[:, 1::2], -parents.float()[:, :6])
    lives = (parents > 0)[:, ::2]
    for own, expected in zip(
        slots.launch_select_next(candidates, lives, 4, 4),
        choose_next_search_beams(candidates, lives, 4, 4),
        strict=True,
    ):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("semantics", ["hf", "vllm", "tridecode"])
def test_step_with_the_kernel_is_the_step_without(semantics: str) -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 40, generator=random).bfloat16().to(DEVICE)
    scores = -torch.rand(3, 5, generator=random).to(DEVICE)
    scores[0, 1:] = scores[1] = DEAD
    rules = rules_of(5, semantics, (1, 7))
    by_kernel, by_torch = (
        take_packed_search_step(rules, logits, SearchBeams(scores), SearchInputs(select_next=one))
        for one in (slots.launch_select_next, choose_next_search_beams)
    )
    assert by_kernel.layout == by_torch.layout
    assert torch.equal(by_kernel.words, by_torch.words)
