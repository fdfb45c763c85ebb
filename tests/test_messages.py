"""A refusal speaks as the user does whom it refuses."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from vllm import SamplingParams

from vllm_trie.messages import BEAM_WIDTH, LLM_BEAM_SEARCH, TICKET, USE_BEAM_SEARCH, GroupTicket

LLM_WIDTH = "BeamSearchParams.beam_width"


@pytest.mark.parametrize(
    ("message", "over_http", "offline"),
    [
        ("beam_width=9 exceeds max_num_seqs=8", "use_beam_search with n=9 exceeds max_num_seqs=8", f"{LLM_WIDTH}=9 ex"),
        (
            "n=4 is more; use beam_width <= 150",
            "n=4 is more; use use_beam_search with n <= 150",
            f"n=4 is more; use {LLM_WIDTH} <= 150",
        ),
        (
            "x=1 is not supported together with beam_width",
            "x=1 is not supported together with use_beam_search",
            "x=1 is",
        ),
        ("beam_width does not work on", "use_beam_search does not work on", "LLM.beam_search does not work on"),
        (
            "num_beams=2; did you mean beam_width?",
            "num_beams=2; did you mean use_beam_search with n?",
            "num_beams=2; did",
        ),
        (
            "x=1; known: threshold, beam_width, n",
            "x=1; known: threshold, beam_width, n",
            "x=1; known: threshold, beam_width",
        ),
        ("beam_widths=[0] is no list", "beam_widths=[0] is no list", "beam_widths=[0] is no list"),
        ("max_beam_width=2 is the limit", "max_beam_width=2 is the limit", "max_beam_width=2 is the limit"),
    ],
)
def test_a_refusal_is_in_the_words_of_who_asks(message: str, over_http: str, offline: str) -> None:
    assert BEAM_WIDTH.in_its_words(message) == message
    assert USE_BEAM_SEARCH.in_its_words(message) == over_http
    assert LLM_BEAM_SEARCH.in_its_words(message).startswith(offline)


def test_a_ticket_survives_the_way_to_the_engine() -> None:
    ticket = GroupTicket("key", 2, 1, {"beam_width": 4}, LLM_BEAM_SEARCH)
    sent = {**asdict(ticket), "caller": list(ticket.caller)}  # as MessagePack brings it
    found = GroupTicket.of(SamplingParams(extra_args={TICKET: sent}))
    assert found == ticket
    assert found.is_offline
    assert not GroupTicket("key", 2, 1).is_offline


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}, {TICKET: "forged"}, {TICKET: ["forged"]}])
def test_what_is_no_ticket_is_none(extra_args: dict | None) -> None:
    assert GroupTicket.of(SamplingParams(extra_args=extra_args)) is None
    assert GroupTicket.of(None) is None
