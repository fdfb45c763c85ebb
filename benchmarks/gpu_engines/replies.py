"""Whether what was timed is the search that a table names: each case looks at the last replies to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_engines.options import CACHED
from vllm_trie.options import PLUGIN_NAME

LEAST_CACHED = 0.9  # of a prompt that all calls share; the last block of one is never cached


def check_hypotheses(found: Sequence[Sequence[int]], width: int, num_tokens: int) -> None:
    """Raise RuntimeError unless these are so many different hypotheses, all of so many tokens."""
    if len({tuple(tokens) for tokens in found}) != width or {len(tokens) for tokens in found} != {num_tokens}:
        lengths = sorted({len(tokens) for tokens in found})
        raise RuntimeError(f"a reply has {len(found)} hypotheses, of {lengths} tokens, not {width} of {num_tokens}")


def check_cached(num_cached: int | None, kind: str, length: int) -> None:
    """Raise RuntimeError unless the prefix cache held what it should of a prompt of that kind and length."""
    if num_cached is None or (num_cached < LEAST_CACHED * length if kind == CACHED else num_cached > 0):
        raise RuntimeError(f"{num_cached} of {length} tokens of a prompt that is to be {kind} were cached")


def arrays_of(params: dict[str, Any] | None) -> list[list[int]]:
    """The hypotheses of an answer as arrays, by its `kv_transfer_params`; none without the plugin."""
    return ((params or {}).get(PLUGIN_NAME) or {}).get("token_ids", [])


def outputs_of(output: Any) -> list[Sequence[int]]:
    """The hypotheses of an answer as outputs. Raises RuntimeError where one has no sum, as samples have none."""
    if any(one.cumulative_logprob is None for one in output.outputs):
        raise RuntimeError("a reply has no sums of log-probabilities: it was sampled, and not searched")
    return [one.token_ids for one in output.outputs]
