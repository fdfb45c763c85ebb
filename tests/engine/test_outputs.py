"""The mailbox: n outputs find their n return addresses, however those come and go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import Request

from vllm_trie.engine.outputs import Mailbox, outputs_so_far
from vllm_trie.messages import NO_HYPOTHESIS, GroupTicket

TICKET = GroupTicket("key", 3, eos_token_id=1)


def request(request_id: str, client_index: int = 0) -> Request:
    return Request(request_id, [2, 3], SamplingParams(max_tokens=4), None, client_index=client_index)


def outputs(count: int) -> list[EngineCoreOutput]:
    return [EngineCoreOutput(request_id="", new_token_ids=[i], finish_reason=FinishReason.STOP) for i in range(count)]


def sent(mailbox: Mailbox) -> list[tuple[int, str, list[int]]]:
    return [(client, output.request_id, output.new_token_ids) for client, output in mailbox.empty()]


def test_each_address_gets_the_hypothesis_of_its_index() -> None:
    mailbox = Mailbox()
    assert mailbox.register(TICKET, request("0_p", 4))
    assert not mailbox.register(TICKET, request("2_p", 4))
    assert not mailbox.register(TICKET, request("1_p", 5))
    assert not mailbox
    mailbox.post("0_p", outputs(3))
    assert mailbox
    assert sorted(sent(mailbox)) == [(4, "0_p", [0]), (4, "2_p", [2]), (5, "1_p", [1])]
    assert not mailbox._deliveries


def test_an_address_that_arrives_after_the_search_still_gets_its_output() -> None:
    mailbox = Mailbox()
    mailbox.register(TICKET, request("0_p"))
    mailbox.post("0_p", outputs(3))
    assert sent(mailbox) == [(0, "0_p", [0])]
    assert len(mailbox._deliveries) == 1
    for index in (2, 1):
        mailbox.register(TICKET, request(f"{index}_p"))
        assert sent(mailbox) == [(0, f"{index}_p", [index])]
    assert not mailbox._deliveries


def test_the_group_ends_with_the_last_address_that_leaves() -> None:
    mailbox = Mailbox()
    for index in range(3):
        mailbox.register(TICKET, request(f"{index}_p"))
    assert mailbox.withdraw("0_p") is None
    assert mailbox.withdraw("2_p") is None
    assert mailbox.withdraw("1_p") == "0_p"
    assert not mailbox._deliveries


def test_addresses_that_left_get_nothing() -> None:
    mailbox = Mailbox()
    for index in range(3):
        mailbox.register(TICKET, request(f"{index}_p"))
    mailbox.withdraw("0_p")
    mailbox.post("0_p", outputs(3))
    assert [request_id for _, request_id, _ in sent(mailbox)] == ["1_p", "2_p"]
    assert not mailbox._deliveries


def test_an_address_whose_group_is_gone_is_aborted_too() -> None:
    mailbox = Mailbox()
    mailbox.register(TICKET, request("0_p"))
    assert mailbox.withdraw("0_p") == "0_p"
    assert not mailbox.register(TICKET, request("1_p"))
    ((_, output),) = mailbox.empty()
    assert output.request_id == "1_p"
    assert (output.finish_reason, output.stop_reason) == (FinishReason.ABORT, NO_HYPOTHESIS)


def test_an_address_whose_group_is_gone_is_not_that_of_another_group_of_the_same_id() -> None:
    mailbox = Mailbox()
    mailbox.register(TICKET, request("0_p"))
    mailbox.withdraw("0_p")
    mailbox.register(replace(TICKET, key="another"), request("0_p"))
    assert not mailbox.register(TICKET, request("1_p"))
    ((_, output),) = mailbox.empty()
    assert (output.finish_reason, output.stop_reason) == (FinishReason.ABORT, NO_HYPOTHESIS)


def test_of_a_search_that_was_aborted_with_nothing_the_first_output_alone_may_stand_for_a_hypothesis() -> None:
    assert [output.stop_reason for output in outputs_so_far([], 3, None)] == [None, NO_HYPOTHESIS, NO_HYPOTHESIS]


def test_a_group_is_abandoned_once_all_who_wait_for_it_are_gone() -> None:
    mailbox = Mailbox()
    for index in range(3):
        mailbox.register(TICKET, request(f"{index}_p"))
    mailbox.register(GroupTicket("other", 1, eos_token_id=1), request("q"))
    assert mailbox.abandoned_by(["0_p", "1_p", "q", "somebody"]) == ["q"]
    mailbox.withdraw("2_p")
    assert {*mailbox.abandoned_by(["0_p", "1_p", "q"])} == {"0_p", "q"}
    assert {*mailbox.abandoned_by(None)} == {"0_p", "q"}
    mailbox.answer("0_p", outputs(3))
    assert sent(mailbox) == [(0, "0_p", [0]), (0, "1_p", [1])]
    assert [mailbox.withdraw(request_id) for request_id in ("0_p", "1_p", "q")] == [None, "0_p", "q"]
    assert not mailbox._deliveries


def test_requests_of_others_are_left_alone() -> None:
    assert Mailbox().withdraw("0_somebody") == "0_somebody"


@pytest.mark.parametrize("request_id", ["user_7", "0_user", "3_3_3"])
def test_a_single_output_is_the_group_whatever_its_id_looks_like(request_id: str) -> None:
    mailbox = Mailbox()
    assert mailbox.register(GroupTicket("key", 1, eos_token_id=1), request(request_id))
    mailbox.post(request_id, outputs(1))
    assert sent(mailbox) == [(0, request_id, [0])]
    assert not mailbox._deliveries


def test_children_of_a_parent_with_an_odd_id_are_told_apart() -> None:
    ticket = GroupTicket("key", 12, eos_token_id=1)
    found = [ticket.address(f"{index}_1_x_0") for index in (0, 1, 11)]
    assert found == [(0, "0_1_x_0"), (1, "0_1_x_0"), (11, "0_1_x_0")]


def test_aborting_an_address_twice_leaves_the_group_to_the_others() -> None:
    mailbox = Mailbox()
    for index in range(3):
        mailbox.register(TICKET, request(f"{index}_p"))
    assert mailbox.withdraw("0_p") is None
    assert mailbox.withdraw("0_p") is None
    mailbox.post("0_p", outputs(3))
    assert [request_id for _, request_id, _ in sent(mailbox)] == ["1_p", "2_p"]


def test_ending_everything_names_all_who_waited_beside_the_groups() -> None:
    mailbox = Mailbox()
    for index in range(3):
        mailbox.register(TICKET, request(f"{index}_p"))
    mailbox.refuse(request("unwanted"), "no")
    assert [r.request_id for r in mailbox.withdraw_all()] == ["1_p", "2_p"]
    assert not mailbox._deliveries
    assert [request_id for _, request_id, _ in sent(mailbox)] == ["unwanted"]
