"""Responses that are whole, as server-sent events."""

from __future__ import annotations

import pytest
from vllm.entrypoints.openai.completion.protocol import CompletionResponse

from vllm_trie.entrypoints.server.streams import _stream_chunks


@pytest.mark.parametrize("has_usage", [False, True])
def test_the_chunk_of_the_last_choice_alone_has_what_is_large(has_usage: bool) -> None:
    choices = [{"index": index, "text": "x"} for index in range(3)]
    usage = {"prompt_tokens": 1, "total_tokens": 4}
    trace = {"tokens": [[1, 2]], "texts": [(1, "x")]}
    response = CompletionResponse.model_validate({"model": "m", "choices": choices, "usage": usage, "trace": trace})
    chunks = [*_stream_chunks(response, has_usage, None)]
    assert [chunk.get("trace") for chunk in chunks] == [None, None, trace, *[None] * has_usage]
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 1, *[0] * has_usage]
    of_search = {"trie_beam": {"item_ids": [4, 5, 6]}}
    along = CompletionResponse.model_validate(
        {"model": "m", "choices": choices, "usage": usage, "kv_transfer_params": of_search}
    )
    chunks = [*_stream_chunks(along, has_usage, None)]
    assert [chunk.get("kv_transfer_params") for chunk in chunks] == [None, None, of_search, *[None] * has_usage]
    untraced = CompletionResponse.model_validate({"model": "m", "choices": choices, "usage": usage})
    assert not any("trace" in chunk for chunk in _stream_chunks(untraced, has_usage, None))
