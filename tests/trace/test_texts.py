"""Texts of traces, made in the front end."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm.outputs import RequestOutput
from vllm.tokenizers import get_tokenizer

from tests.support.engine import TRAINED_TARGET
from tests.support.tokenizers import word_pieces
from tests.support.traces import random_trace
from vllm_trie import Trace
from vllm_trie.entrypoints.answers.search_state import whole_answer
from vllm_trie.entrypoints.output_hooks import completing_by_output_hooks
from vllm_trie.trace.texts import DECODED_AT_ONCE
from vllm_trie.trace.trace import trace_tokens_of


def output_of(sent: dict[str, Any]) -> RequestOutput:
    return RequestOutput("1", "", [1], None, [], True, kv_transfer_params={"trie_beam": {"trace": sent}})


def test_other_requests_go_on_while_the_texts_are_made() -> None:
    sent = {**random_trace(20, 40, num_drafts=30).as_dict(), "texts": []}
    tokens, tokenizer = trace_tokens_of(sent), get_tokenizer(TRAINED_TARGET)
    num_turns = 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def traced() -> RequestOutput:
        going_on = asyncio.ensure_future(others())
        output = await whole_answer(output_of(sent), tokenizer)
        going_on.cancel()
        return output

    assert len(tokens) > DECODED_AT_ONCE
    assert Trace.of(asyncio.run(traced())).texts == {token: tokenizer.decode([token]) for token in tokens}
    assert num_turns >= len(tokens) // DECODED_AT_ONCE


def test_texts_have_the_spaces_that_answers_have() -> None:
    tokenizer = word_pieces(["x .", "x"])
    spaced, plain = tokenizer.convert_tokens_to_ids(["x .", "x"])
    output = output_of({**random_trace(1, 1).as_dict(), "tokens": [[spaced], [plain]], "texts": []})
    assert [*completing_by_output_hooks(output, tokenizer)]
    assert tokenizer.decode([spaced]) == "x."
    assert Trace.of(output).texts[spaced] == "x ."


def test_without_a_tokenizer_there_are_no_texts() -> None:
    output = output_of({**random_trace(2, 3).as_dict(), "texts": []})
    assert not [*completing_by_output_hooks(output, None)]
    assert Trace.of(output).texts == {}
