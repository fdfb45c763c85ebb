"""The texts of a trace's tokens. There may be tens of thousands, which take a second to decode, so that the front end
makes them, and not the engine, where all requests would wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

from vllm_trie.detokenizing import decoder, is_backed
from vllm_trie.options import PLUGIN_NAME
from vllm_trie.trace.trace import tokens_of

DECODED_AT_ONCE = 256  # tokens, before other requests have their turn


def is_traced(params: Any) -> bool:
    """Whether these are the parameters of a request with a trace."""
    return isinstance(params, SamplingParams) and bool((params.extra_args or {}).get("trace"))


def add_texts(outputs: Sequence[Any], tokenizer: TokenizerLike | None) -> None:
    """Add the texts to the traces that outputs of a step have."""
    for output in outputs:
        for _ in _adding(output, tokenizer):
            pass


async def with_texts(
    outputs: AsyncGenerator[RequestOutput, None], tokenizer: TokenizerLike | None
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of a request with a trace. Other requests go on while its texts are made."""
    async with aclosing(outputs):
        async for output in outputs:
            for _ in _adding(output, tokenizer):
                await asyncio.sleep(0)
            yield output


def _adding(output: Any, tokenizer: TokenizerLike | None) -> Iterator[None]:
    """Add the texts to the trace that an output may have, and pause after every few."""
    answer = output.kv_transfer_params if isinstance(output, RequestOutput) else None
    trace = ((answer or {}).get(PLUGIN_NAME) or {}).get("trace")
    if trace is None or tokenizer is None:
        return
    tokens, as_vllm_writes = tokens_of(trace), _Uncleaned(tokenizer)
    for start in range(0, len(tokens), DECODED_AT_ONCE):
        some = tokens[start : start + DECODED_AT_ONCE]
        trace["texts"] += zip(some, convert_ids_list_to_tokens(as_vllm_writes, some), strict=True)
        yield


class _Uncleaned:
    """What vLLM asks of a tokenizer for the texts of single tokens, with the spaces that texts of answers have."""

    def __init__(self, tokenizer: Any) -> None:
        self.backend_tokenizer = tokenizer.backend_tokenizer if is_backed(tokenizer) else None
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens
        self.decode = decoder(tokenizer, skip_special_tokens=False)
