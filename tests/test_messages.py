"""The tickets of requests."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from vllm import SamplingParams

from vllm_trie.messages import LLM_BEAM_SEARCH, TICKET, GroupTicketMessage


def test_a_ticket_survives_the_way_to_the_engine() -> None:
    ticket = GroupTicketMessage(2, 1, {"beam_width": 4}, LLM_BEAM_SEARCH)
    sent = {**asdict(ticket), "caller": list(ticket.caller)}  # as MessagePack brings it
    found = GroupTicketMessage.of(SamplingParams(extra_args={TICKET: sent}))
    assert found == ticket
    assert found.is_offline
    assert not GroupTicketMessage(2, 1).is_offline


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}, {TICKET: "forged"}, {TICKET: ["forged"]}])
def test_what_is_no_ticket_is_none(extra_args: dict | None) -> None:
    assert GroupTicketMessage.of(SamplingParams(extra_args=extra_args)) is None
    assert GroupTicketMessage.of(None) is None
