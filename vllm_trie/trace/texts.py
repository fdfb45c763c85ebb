"""Adds the texts of tokens to a trace, in the front end: decoding tens of thousands takes a second, for which all
requests would wait in the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

from vllm_trie.detokenizing import detokenizing_function, is_detokenizing_in_rust
from vllm_trie.trace.trace import trace_tokens_of

DECODED_AT_ONCE = 256  # tokens before other requests get a turn


def complete_trace(_: Any, answer: dict[str, Any], tokenizer: TokenizerLike | None) -> Iterator[None]:
    """Add texts to the trace in an answer; yields after every few."""
    if tokenizer is None:
        return
    trace = answer["trace"]
    tokens, as_vllm_writes = trace_tokens_of(trace), _UncleanedTraceTexts(tokenizer)
    for start in range(0, len(tokens), DECODED_AT_ONCE):
        some = tokens[start : start + DECODED_AT_ONCE]
        trace["texts"] += zip(some, convert_ids_list_to_tokens(as_vllm_writes, some), strict=True)
        yield


class _UncleanedTraceTexts:
    """The parts of a tokenizer that vLLM needs for texts of single tokens, with the spaces of answers' texts."""

    def __init__(self, tokenizer: Any) -> None:
        self.backend_tokenizer = tokenizer.backend_tokenizer if is_detokenizing_in_rust(tokenizer) else None
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens
        self.decode = detokenizing_function(tokenizer, skip_special_tokens=False)
