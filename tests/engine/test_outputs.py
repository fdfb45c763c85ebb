"""What the engine sends of a search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from vllm_trie.engine.hypothesis import NO_HYPOTHESES, GroupHypotheses, GroupTokenReports
from vllm_trie.engine.outputs import (
    EngineOutbox,
    add_to_engine_output,
    compact_engine_answer,
    engine_answer_output,
    engine_error_output,
    engine_scores_and_stops,
)
from vllm_trie.messages import HYPOTHESES, NO_HYPOTHESIS, SentHypotheses
from vllm_trie.search.stopping import NO_TOKEN

EOS, STOP = 1, 7


def request(request_id: str, client_index: int = 0) -> Request:
    return Request(request_id, [2, 3], SamplingParams(max_tokens=4), None, client_index=client_index)


def found(
    *token_ids: list[int], stopped_by: Sequence[int] = (), leaves: Sequence[int] = (), reports: bool = False
) -> GroupHypotheses:
    """Of each hypothesis its log-probability is less by its tokens, and its rank is its token."""
    flat = np.array([token for tokens in token_ids for token in tokens])
    logprobs = np.tile(np.array([-1.0, -2.0], np.float32), (len(flat), 1))
    own = GroupTokenReports(np.column_stack([flat, np.full(len(flat), 9)]), logprobs, flat)
    stops = np.array([*stopped_by] or len(token_ids) * [NO_TOKEN])
    numbers, scores = np.array([*leaves] or [*range(len(token_ids))]), np.full(len(token_ids), -0.5)
    sums = -np.array([*map(sum, token_ids)], np.float64)
    return GroupHypotheses(numbers, [*token_ids], sums, scores, stops, stops != NO_TOKEN, own if reports else None)


def sent_of(output: EngineCoreOutput) -> SentHypotheses:
    return output.kv_transfer_params["trie_beam"][HYPOTHESES]


def test_one_output_holds_all_hypotheses_one_after_the_other() -> None:
    best = found([4, EOS], [5, 6, 2], [3, STOP], stopped_by=[EOS, NO_TOKEN, STOP])
    output = engine_answer_output(best, 3, EOS)
    assert output.new_token_ids == [4, EOS, 5, 6, 2, 3, STOP]
    assert output.new_logprobs is None
    assert output.finish_reason is FinishReason.STOP, "that of the best"
    assert sent_of(output) == SentHypotheses([2, 3, 2], [0, 1, 0], [None, None, STOP], [-5.0, -13.0, -10.0])


def test_log_probabilities_come_one_after_the_other_too() -> None:
    output = engine_answer_output(found([4, 5], [6], reports=True), 2, EOS)
    assert output.new_logprobs.logprob_token_ids.tolist() == [[4, 9], [5, 9], [6, 9]]
    assert output.new_logprobs.sampled_token_ranks.tolist() == [4, 5, 6]


def test_what_outputs_leave_out_has_no_log_probabilities() -> None:
    output = engine_answer_output(found([4, 5], [6], [7, 8], reports=True), 2, EOS)
    assert output.new_token_ids == [4, 5, 6]
    assert output.new_logprobs.sampled_token_ranks.tolist() == [4, 5, 6]


def test_arrays_and_beam_results_have_one_entry_of_each_hypothesis() -> None:
    best = found([4, EOS], [5, 6, 2], [3, 5], stopped_by=[EOS, NO_TOKEN, NO_TOKEN])
    reasons = ["stop", "length", "stop"]  # the last one ends before its length is reached: a stop string ended it
    compact = compact_engine_answer(best, max_length=3)
    assert (compact["token_ids"], compact["finish_reasons"]) == ([[4, EOS], [5, 6, 2], [3, 5]], reasons)
    assert (compact["cumulative_logprobs"], compact["scores"]) == ([-5.0, -13.0, -8.0], [-0.5] * 3)
    assert compact_engine_answer(best, 3, is_aborted=True)["finish_reasons"] == ["abort"] * 3
    assert engine_scores_and_stops(best) == [{"sequence_score": -0.5, "matched": stop} for stop in (EOS, None, None)]


def test_the_answer_to_a_request_for_one_is_as_vllms() -> None:
    output = engine_answer_output(found([4, STOP], [5], stopped_by=[STOP, NO_TOKEN]), 1, EOS)
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([4, STOP], FinishReason.STOP, STOP)
    assert output.new_logprobs.logprobs.tolist() == [[-11.0]], "the sum alone"
    assert output.kv_transfer_params is None


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_a_search_without_a_hypothesis_says_so(num_outputs: int) -> None:
    output = engine_answer_output(NO_HYPOTHESES, num_outputs, EOS)
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, NO_HYPOTHESIS)
    assert math.isnan(output.new_logprobs.logprobs.sum())
    output = engine_answer_output(NO_HYPOTHESES, num_outputs, EOS, is_aborted=True)
    assert (output.finish_reason, output.stop_reason) == (FinishReason.ABORT, None)
    assert math.isnan(output.new_logprobs.logprobs.sum())


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_no_hypothesis_of_an_aborted_search_keeps_its_own_reason(num_outputs: int) -> None:
    best = found([4, STOP], [5], stopped_by=[STOP, NO_TOKEN], leaves=[0, ~0])
    sent = sent_of(engine_answer_output(best, num_outputs, EOS, is_aborted=True))
    assert sent.are_aborted
    assert sent.finish_reasons == [0, 1][:num_outputs], "by which vLLM leaves the stop token out of the text"
    assert not sent_of(engine_answer_output(best, 3, EOS)).are_aborted


def test_to_vllm_an_aborted_search_is_aborted_unless_a_single_text_needs_its_own_reason() -> None:
    ended, going_on = found([4, STOP], stopped_by=[STOP]), found([5], [6])
    reasons = [
        engine_answer_output(best, n, EOS, is_aborted=True).finish_reason for best in (ended, going_on) for n in (1, 3)
    ]
    assert reasons == [FinishReason.STOP, FinishReason.ABORT, FinishReason.ABORT, FinishReason.ABORT]


QUEUED, SCHEDULED, PREEMPTED = EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED, EngineCoreEventType.PREEMPTED


@pytest.mark.parametrize(
    ("noted", "status", "sent"),
    [
        ([], RequestStatus.WAITING, [QUEUED, SCHEDULED]),
        ([QUEUED], RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR, [QUEUED, SCHEDULED]),
        ([QUEUED, SCHEDULED], RequestStatus.RUNNING, [QUEUED, SCHEDULED]),
        ([QUEUED, SCHEDULED, PREEMPTED], RequestStatus.PREEMPTED, [QUEUED, SCHEDULED, PREEMPTED]),
        ([], RequestStatus.RUNNING, None),
    ],
)
def test_outputs_bring_the_times_of_their_requests_once(noted: list[Any], status: Any, sent: list[Any] | None) -> None:
    of, outbox, outputs = request("one"), EngineOutbox(), dict[int, EngineCoreOutputs]()
    of.status = status
    for event in noted:
        of.record_event(event)
    outbox.post(of, engine_error_output("why"))
    outbox.empty_into(outputs, lists_finished=False)
    ((output,),) = [outputs[0].outputs]
    assert (output.events and [event.type for event in output.events]) == sent
    assert not of.events


def test_more_may_be_added_to_an_answer() -> None:
    output = engine_answer_output(found([4], [5]), 2, EOS)
    add_to_engine_output(output, {"trace": 1})
    add_to_engine_output(output, {})
    assert {*output.kv_transfer_params["trie_beam"]} == {HYPOTHESES, "trace"}


def test_outputs_go_to_the_clients_that_asked() -> None:
    outbox, outputs = EngineOutbox(), {4: EngineCoreOutputs(finished_requests={"other"})}
    for name, client in (("first", 4), ("second", 5)):
        outbox.post(request(name, client), engine_error_output("why"))
    outbox.post(request("third", 5), EngineCoreOutput("", [3]))
    assert outbox
    outbox.empty_into(outputs, lists_finished=True)
    assert not outbox
    found = {client: [output.request_id for output in of.outputs] for client, of in outputs.items()}
    assert found == {4: ["first"], 5: ["second", "third"]}
    assert {client: of.finished_requests for client, of in outputs.items()} == {4: {"other", "first"}, 5: {"second"}}
