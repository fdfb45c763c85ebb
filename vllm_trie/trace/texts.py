"""The texts of a trace's tokens. There may be tens of thousands, which take a second to decode, so that the front end
makes them, and not the engine, where all requests would wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

from vllm_trie.detokenizing import detokenizing_function, is_detokenizing_in_rust
from vllm_trie.trace.trace import trace_tokens_of

DECODED_AT_ONCE = 256  # tokens, before other requests have their turn


def complete_trace(_: Any, answer: dict[str, Any], tokenizer: TokenizerLike | None) -> Iterator[None]:
    """Add the texts to the trace that an answer has, and pause after every few."""
    if tokenizer is None:
        return
    trace = answer["trace"]
    tokens, as_vllm_writes = trace_tokens_of(trace), _UncleanedTraceTexts(tokenizer)
    for start in range(0, len(tokens), DECODED_AT_ONCE):
        some = tokens[start : start + DECODED_AT_ONCE]
        trace["texts"] += zip(some, convert_ids_list_to_tokens(as_vllm_writes, some), strict=True)
        yield


class _UncleanedTraceTexts:
    """What vLLM asks of a tokenizer for the texts of single tokens, with the spaces that texts of answers have."""

    def __init__(self, tokenizer: Any) -> None:
        self.backend_tokenizer = tokenizer.backend_tokenizer if is_detokenizing_in_rust(tokenizer) else None
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens
        self.decode = detokenizing_function(tokenizer, skip_special_tokens=False)
