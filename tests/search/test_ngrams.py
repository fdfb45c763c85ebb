"""What would repeat an n-gram is what transformers' processor says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from vllm_trie.search.constraints.constraint import NOTHING
from vllm_trie.search.constraints.ngrams import NGramConstraint
from vllm_trie.worker.rows.row_beams import row_tokens_flush_right

VOCAB = 4


def texts(num_texts: int, length: int) -> torch.Tensor:
    return torch.randint(VOCAB, (num_texts, length), generator=torch.Generator().manual_seed(length), dtype=torch.int32)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 30])
def test_it_is_what_transformers_bans(size: int, length: int) -> None:
    histories, logprobs = texts(50, length), torch.randn(50, VOCAB).log_softmax(-1)
    expected = NoRepeatNGramLogitsProcessor(size)(histories.long(), logprobs)
    assert torch.equal(NGramConstraint(size).restrict(logprobs, histories), expected)
    assert length < size or size > 3 or (expected == -torch.inf).any()
    for token in range(VOCAB):
        bans = ~NGramConstraint(size).leads_on(histories, torch.full((50,), token))
        assert torch.equal(bans, expected[:, token] == -torch.inf)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_histories_of_several_lengths_are_looked_through_together(size: int) -> None:
    lengths = np.array([9, 2, 1, 5])
    tokens, logprobs = texts(8, 9).view(4, 2, 9), torch.zeros(4, 2, VOCAB)
    found = NGramConstraint(size).restrict(logprobs, row_tokens_flush_right(tokens, lengths))
    for number, length in enumerate(lengths):
        alone = NGramConstraint(size).restrict(logprobs[number], tokens[number, :, :length])
        assert torch.equal(found[number], alone)


def test_nothing_in_front_of_a_history_repeats_nothing() -> None:
    histories = torch.tensor([[NOTHING, NOTHING, NOTHING, 2], [NOTHING, 1, 3, 1]])
    found = NGramConstraint(2).restrict(torch.zeros(2, VOCAB), histories)
    assert (found == -torch.inf).nonzero().tolist() == [[1, 3]]
    assert (NGramConstraint(4).restrict(torch.zeros(2, VOCAB), histories) == 0).all()


def test_histories_of_equal_length_are_not_copied() -> None:
    tokens = texts(4, 6).view(2, 2, 6)
    assert row_tokens_flush_right(tokens, np.array([6, 6])) is tokens
