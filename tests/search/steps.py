"""Steps of the search on the host, with and without shortcuts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from vllm_trie.search import filters, rank, slots
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.step import Step, packed, take_step, unpacked


@contextmanager
def shortcuts(allowed: bool) -> Iterator[None]:
    """Within it, the search looks at tensors to save work, as on a CPU, or it does not."""
    with ExitStack() as stack:
        for module in (filters, rank, slots):
            stack.enter_context(patch.object(module, "sees", lambda _: allowed))
        yield


def rules_of(width: int, semantics: str = "hf", stops: tuple[int, ...] = (), **others: Any) -> SelectRules:
    """Rules of a search that asks for nothing but what is said."""
    defaults = {"stop_strings": (), "skip_special_tokens": True, "num_logprobs": None, "is_controlled": False}
    return SelectRules(width=width, semantics=semantics, stop_token_ids=stops, **(defaults | others))


def steps_of(rules: SelectRules, logits: torch.Tensor, scores: torch.Tensor, **others: Any) -> list[Step]:
    """The step of each group, on the host."""
    tensor, layout = packed(take_step(rules, logits, scores, **others))
    return unpacked(tensor.numpy(), layout)
