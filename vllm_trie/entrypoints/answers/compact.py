"""All hypotheses of a search as arrays, read from the only output of a request with `compact=True`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_trie.options import PLUGIN_NAME

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

NO_TOKEN = -1


@dataclass(frozen=True)
class Hypotheses:
    """The hypotheses of one search, best first.

    Args:
        token_ids: [n, L] int32, padded with -1.
        lengths: [n] int64, in tokens.
        cumulative_logprobs: [n] float64.
        scores: [n] float64, by which they compete.
        finish_reasons: "stop" or, at the greatest length, "length", even if a stop string also ends there.
        item_ids: [n] int64, the item of each hypothesis if the search used a catalog; [n, items] if each has several.
    """

    token_ids: np.ndarray
    lengths: np.ndarray
    cumulative_logprobs: np.ndarray
    scores: np.ndarray
    finish_reasons: list[str]
    item_ids: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.lengths)


def hypotheses(output: RequestOutput) -> Hypotheses:
    """The hypotheses of a request with `compact=True`.

    Args:
        output: As `LLM.generate` returns it.

    Raises:
        ValueError: the request did not have `compact=True`, or failed.
    """
    answer = answer_of_search(output)
    if "token_ids" not in answer:
        (first, *_) = output.outputs
        why = first.stop_reason if first.finish_reason == "error" else "it did not ask for them; pass compact=True"
        raise ValueError(f"request {output.request_id} returned no hypotheses as arrays: {why}")
    tokens = answer["token_ids"]
    lengths = np.array([len(of_one) for of_one in tokens], np.int64)
    token_ids = padded_answer_tokens([*chain.from_iterable(tokens)], lengths)
    sums, scores = (np.array(answer[name], np.float64) for name in ("cumulative_logprobs", "scores"))
    items = np.array(answer["item_ids"], np.int64) if "item_ids" in answer else None
    return Hypotheses(token_ids, lengths, sums, scores, answer["finish_reasons"], items)


def answer_of_search(output: RequestOutput) -> dict[str, Any]:
    """What a search adds to vLLM's output, by name."""
    return (output.kv_transfer_params or {}).get(PLUGIN_NAME, {})


def padded_answer_tokens(token_ids: Sequence[int], lengths: np.ndarray) -> np.ndarray:
    """[n, L] int32, padded with `NO_TOKEN`, from the concatenated tokens of n hypotheses and their lengths [n]."""
    tokens = np.full((len(lengths), lengths.max(initial=0)), NO_TOKEN, np.int32)
    tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = token_ids
    return tokens
