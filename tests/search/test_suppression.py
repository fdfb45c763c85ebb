"""What a model suppresses is what transformers' processors suppress."""

from __future__ import annotations

import pytest
import torch
from transformers import SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor

from vllm_trie.search.constraints.suppression import SuppressionConstraint

VOCAB = 9


@pytest.mark.parametrize(("anywhere", "at_first"), [((2, 5), (0, 8)), ((), (3,)), ((1,), ())])
def test_it_is_what_transformers_suppresses(anywhere: tuple[int, ...], at_first: tuple[int, ...]) -> None:
    constraint, logprobs = SuppressionConstraint(anywhere, at_first), torch.randn(2, 3, VOCAB).log_softmax(-1)
    states, history, before = constraint.begin(3, logprobs.device).expand(2, -1), torch.zeros(6, 4), logprobs.clone()
    for length in (4, 5):
        expected = logprobs.flatten(0, 1)
        for processor in (
            SuppressTokensLogitsProcessor([*anywhere], device="cpu"),
            SuppressTokensAtBeginLogitsProcessor([*at_first], 4, device="cpu"),
        ):
            expected = processor(history[:, :1].expand(-1, length), expected)
        assert torch.equal(constraint.restrict(logprobs, states), expected.view_as(logprobs))
        for token in range(VOCAB):
            leads_on = constraint.leads_on(states, torch.full((2, 3), token))
            assert torch.equal(~leads_on, (expected[:, token] == -torch.inf).view(2, 3))
        states = constraint.advance(states, torch.zeros(2, 3, dtype=torch.int64))
    assert torch.equal(logprobs, before), "what is reported elsewhere stays"
