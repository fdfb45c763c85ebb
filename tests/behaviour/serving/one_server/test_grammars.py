"""Hypotheses keep to what a request says of them: schemas, other grammars, items."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.server import Server
from tests.support.grammars import GRAMMARS, MATCHES, SCHEMA
from tests.support.served import BOTH_WAYS, chat, complete

pytestmark = pytest.mark.slow


@BOTH_WAYS
def test_a_schema_is_followed_by_every_hypothesis(server: Server, options: dict[str, Any]) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "any", "schema": SCHEMA}}
    num_matches = 0
    kinds = [("schema", {"response_format": schema})]
    kinds += [
        (name, {"structured_outputs": GRAMMARS[name]}) for name in ("regex", "choice", "grammar", "structural tag")
    ]
    for name, constraint in kinds:
        of_text = complete(server, n=5, max_tokens=60, **constraint, **options).choices
        of_chat = chat(server, n=5, extra_body=constraint | options).choices
        texts = [(c.text, c.finish_reason) for c in of_text] + [(c.message.content, c.finish_reason) for c in of_chat]
        assert {reason for _, reason in texts} <= {"stop", "length"}
        found = [text for text, reason in texts if reason == "stop" and text]
        assert all(MATCHES[name](text) for text in found), (name, found)
        num_matches += len(found)
    assert num_matches > 15


def test_an_item_is_the_same_whoever_asks_for_it(server: Server) -> None:
    """Token by token: `use_beam_search` leaves out an EOS that ends a hypothesis, and nothing else."""
    asked = {"n": 3, "logprobs": 1, "return_token_ids": True, "max_tokens": 8}
    items = {"allowed_sequences": ["return", "raise", "yield from"]}
    by_width = complete(server, vllm_xargs={"beam_width": 3, **items}, **asked)
    by_flag = complete(server, use_beam_search=True, vllm_xargs=items, **asked)
    for one, other in zip(by_width.choices, by_flag.choices, strict=True):
        assert (one.text, one.token_ids, one.stop_reason) == (other.text, other.token_ids, other.stop_reason)
        assert one.logprobs == other.logprobs
    assert by_width.usage == by_flag.usage
