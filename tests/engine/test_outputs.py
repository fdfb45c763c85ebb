"""What the engine sends of a search."""

from __future__ import annotations

import math

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request

from vllm_trie.engine.hypothesis import Hypothesis, TokenReports
from vllm_trie.engine.outputs import Outbox, add_to_answer, answer_output, answer_so_far, error_output
from vllm_trie.messages import HYPOTHESES, NO_HYPOTHESIS, SentHypotheses

EOS, STOP = 1, 7


def request(request_id: str, client_index: int = 0) -> Request:
    return Request(request_id, [2, 3], SamplingParams(max_tokens=4), None, client_index=client_index)


def hypothesis(*tokens: int, stopped_by: int | None = None, reports: bool = False, **others: bool) -> Hypothesis:
    logprobs = np.tile(np.array([-1.0, -2.0], np.float32), (len(tokens), 1))
    own = TokenReports(np.array([[token, 9] for token in tokens]), logprobs, np.array(tokens))
    return Hypothesis([*tokens], -float(sum(tokens)), -0.5, stopped_by, own if reports else None, **others)


def sent_of(output: EngineCoreOutput) -> SentHypotheses:
    return output.kv_transfer_params["trie_beam"][HYPOTHESES]


def test_one_output_holds_all_hypotheses_one_after_the_other() -> None:
    best = [hypothesis(4, EOS, stopped_by=EOS), hypothesis(5, 6, 2), hypothesis(3, STOP, stopped_by=STOP)]
    output = answer_output(best, 3, EOS)
    assert output.new_token_ids == [4, EOS, 5, 6, 2, 3, STOP]
    assert output.new_logprobs is None
    assert output.finish_reason is FinishReason.STOP, "that of the best"
    assert sent_of(output) == SentHypotheses([2, 3, 2], [0, 1, 0], [None, None, STOP], [-5.0, -13.0, -10.0])


def test_log_probabilities_come_one_after_the_other_too() -> None:
    output = answer_output([hypothesis(4, 5, reports=True), hypothesis(6, reports=True)], 2, EOS)
    assert output.new_logprobs.logprob_token_ids.tolist() == [[4, 9], [5, 9], [6, 9]]
    assert output.new_logprobs.sampled_token_ranks.tolist() == [4, 5, 6]


def test_the_answer_to_a_request_for_one_is_as_vllms() -> None:
    output = answer_output([hypothesis(4, STOP, stopped_by=STOP), hypothesis(5)], 1, EOS)
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([4, STOP], FinishReason.STOP, STOP)
    assert output.new_logprobs.logprobs.tolist() == [[-11.0]], "the sum alone"
    assert output.kv_transfer_params is None


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_a_search_without_a_hypothesis_says_so(num_outputs: int) -> None:
    output = answer_output([], num_outputs, EOS)
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, NO_HYPOTHESIS)
    assert math.isnan(output.new_logprobs.logprobs.sum())
    output = answer_so_far([], num_outputs, EOS)
    assert (output.finish_reason, output.stop_reason) == (FinishReason.ABORT, None)
    assert math.isnan(output.new_logprobs.logprobs.sum())


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_no_hypothesis_of_an_aborted_search_keeps_its_own_reason(num_outputs: int) -> None:
    best = [hypothesis(4, STOP, stopped_by=STOP), hypothesis(5, is_running=True)][:num_outputs]
    output = answer_so_far(best, num_outputs, EOS)
    assert output.finish_reason is FinishReason.STOP, "by which vLLM leaves the stop token out of its text"
    assert sent_of(output).are_aborted
    assert not sent_of(answer_output(2 * best, 3, EOS)).are_aborted


def test_more_may_be_added_to_an_answer() -> None:
    output = answer_output([hypothesis(4), hypothesis(5)], 2, EOS)
    add_to_answer(output, {"trace": 1})
    add_to_answer(output, {})
    assert {*output.kv_transfer_params["trie_beam"]} == {HYPOTHESES, "trace"}


def test_outputs_go_to_the_clients_that_asked() -> None:
    outbox, outputs = Outbox(), {4: EngineCoreOutputs(finished_requests={"other"})}
    for name, client in (("first", 4), ("second", 5)):
        outbox.post(request(name, client), error_output("why"))
    outbox.post(request("third", 5), EngineCoreOutput("", [3]))
    assert outbox
    outbox.empty_into(outputs, tells_finished=True)
    assert not outbox
    found = {client: [output.request_id for output in of.outputs] for client, of in outputs.items()}
    assert found == {4: ["first"], 5: ["second", "third"]}
    assert {client: of.finished_requests for client, of in outputs.items()} == {4: {"other", "first"}, 5: {"second"}}
