"""The one answer of a search becomes n outputs, each as vLLM makes it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import LogprobsLists

from vllm_trie.entrypoints.answers import search_state
from vllm_trie.entrypoints.answers.search_state import AnswerState, whole_answer
from vllm_trie.messages import HYPOTHESES, NO_HYPOTHESIS, SentHypotheses

N = 3
SENT = SentHypotheses([2, 3], [0, 1], [7, None], [-1.5, -2.0])


def request(**params: Any) -> EngineCoreRequest:
    own = SamplingParams(**{"max_tokens": 4, "output_kind": RequestOutputKind.FINAL_ONLY, **params})
    return EngineCoreRequest("r-1", [5, 6], None, own, None, 0.0, None, None, None, external_req_id="r")


def state_of(n: int = N, tokenizer: Any = None, **params: Any) -> AnswerState:
    of = request(**params)
    return AnswerState(RequestState.from_new_request(tokenizer, of, None, None, 0, None, True, 1), of, tokenizer, n)


def processed(state: AnswerState, output: EngineCoreOutput) -> tuple[Any, IterationStats]:
    processor, stats = OutputProcessor(None, log_stats=True), IterationStats()
    processor.request_states["r-1"] = state
    processor.external_req_ids["r"].append("r-1")
    (found,) = processor.process_outputs([output], 1.0, stats).request_outputs
    assert not processor.request_states
    return found, stats


def answer(logprobs: LogprobsLists | None = None, **more: Any) -> EngineCoreOutput:
    sent = {"trie_beam": {HYPOTHESES: [*SENT], **more}}  # as MessagePack brings it
    output = EngineCoreOutput("r-1", [4, 7, 8, 9, 2], logprobs, kv_transfer_params=sent)
    output.finish_reason = FinishReason.LENGTH  # whatever that of each hypothesis is
    return output


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
def test_each_hypothesis_is_an_output_and_what_is_missing_says_so(kind: RequestOutputKind) -> None:
    found, stats = processed(state_of(output_kind=kind), answer(trace=1))
    assert (found.request_id, found.finished) == ("r", True)
    assert [one.index for one in found.outputs] == [0, 1, 2]
    assert [one.token_ids for one in found.outputs] == [[4, 7], [8, 9, 2], []]
    assert [one.finish_reason for one in found.outputs] == ["stop", "length", "stop"]
    assert [one.stop_reason for one in found.outputs] == [7, None, NO_HYPOTHESIS]
    assert [one.cumulative_logprob for one in found.outputs] == [-1.5, -2.0, None]
    assert found.kv_transfer_params == {"trie_beam": {"trace": 1}}
    assert (stats.n_params_iter, stats.max_num_generation_tokens_iter) == ([N], [3])
    assert stats.num_generation_tokens == 5


@pytest.mark.parametrize("n", [1, N])
def test_what_a_kv_connector_says_is_handed_on(n: int) -> None:
    sent = answer(trace=1)
    sent.kv_transfer_params["do_remote_prefill"] = True
    found, _ = processed(state_of(n), sent)
    assert found.kv_transfer_params == {"do_remote_prefill": True, "trie_beam": {"trace": 1}}
    sent.kv_transfer_params = {"do_remote_prefill": True}
    found, _ = processed(state_of(n), sent)
    assert found.kv_transfer_params == {"do_remote_prefill": True}


@pytest.mark.parametrize("n", [1, N])
@pytest.mark.parametrize("is_served", [False, True])
def test_an_answer_is_complete_offline_and_later_in_a_server(n: int, is_served: bool) -> None:
    sent = [{"sequence_score": -0.5, "matched": 7}, {"sequence_score": -1.0, "matched": None}][:n]
    state, processor = state_of(n), OutputProcessor(None, log_stats=False)
    state.queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "r-1") if is_served else None
    processor.request_states["r-1"] = state
    processor.external_req_ids["r"].append("r-1")
    outputs = processor.process_outputs([answer(beam_results=sent)], 1.0).request_outputs
    found: Any = state.queue.get_nowait() if state.queue is not None else outputs[0]
    assert (found.kv_transfer_params["trie_beam"]["beam_results"] == sent) is is_served
    found = asyncio.run(whole_answer(found)) if is_served else found
    results = found.kv_transfer_params["trie_beam"]["beam_results"]
    assert [of["output_ids"] for of in results] == [one.token_ids for one in found.outputs[:2]]


def test_each_output_has_its_log_probabilities() -> None:
    tokens = np.array([[4, 1], [7, 1], [8, 1], [9, 1], [2, 1]])
    logprobs = LogprobsLists(tokens, np.full((5, 2), -0.5, np.float32), np.arange(1, 6))
    found, _ = processed(state_of(logprobs=1), answer(logprobs))
    assert [[[*of_token] for of_token in one.logprobs] for one in found.outputs] == [
        [[4, 1], [7, 1]],
        [[8, 1], [9, 1], [2, 1]],
        [],
    ]
    assert [one.cumulative_logprob for one in found.outputs] == [-1.0, -1.5, None]
    assert found.kv_transfer_params is None


def test_a_search_that_cannot_go_on_says_so_in_each_output() -> None:
    error = EngineCoreOutput("r-1", [], finish_reason=FinishReason.ERROR, stop_reason="why")
    found, _ = processed(state_of(), error)
    assert [(one.finish_reason, one.stop_reason) for one in found.outputs] == N * [("error", "why")]


def test_of_a_search_that_was_aborted_with_nothing_the_first_output_alone_may_stand_for_a_hypothesis() -> None:
    found = state_of().make_request_output([], None, FinishReason.ABORT, None)
    assert [one.finish_reason for one in found.outputs] == N * ["abort"]
    assert [one.stop_reason for one in found.outputs] == [None, NO_HYPOTHESIS, NO_HYPOTHESIS]


@pytest.mark.parametrize("n", [1, N])
def test_all_of_an_aborted_search_is_aborted_though_a_stop_string_ended_it(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IncrementalDetokenizer, "update", lambda *_: "stop string")
    sent = {"trie_beam": {HYPOTHESES: [n * [1], n * [0], n * [7], n * [-1.0], True]}}
    output = EngineCoreOutput("r-1", n * [4], finish_reason=FinishReason.STOP, kv_transfer_params=sent)
    found, _ = processed(state_of(n=n), output)
    assert [(one.finish_reason, one.stop_reason) for one in found.outputs] == n * [("abort", None)]
    assert found.kv_transfer_params is None


def test_a_server_makes_outputs_one_by_one_and_serves_others_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_state, "SECONDS_AT_ONCE", 0.0)
    state, turns = state_of(), []
    state.queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "r-1")

    async def serve() -> Any:
        async def other() -> None:
            for _ in range(3):
                turns.append(len(output.outputs))
                await asyncio.sleep(0)

        state._kept.output = answer()
        output = state.make_request_output([], None, FinishReason.STOP, None, answer().kv_transfer_params)
        second = asyncio.ensure_future(other())
        await whole_answer(output)
        await second
        return output

    output = asyncio.run(serve())
    assert turns == [1, 2, 3]
    assert [one.token_ids for one in output.outputs] == [[4, 7], [8, 9, 2], []]
    assert asyncio.run(whole_answer(output)) is output


def test_a_server_takes_up_few_log_probabilities_before_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also within a hypothesis, and of the first one."""
    lengths, counts, update = [900, 1, 320, 641], [0], LogprobsProcessor.update_from_output
    sent = SentHypotheses(lengths, [1, 0, 1, 0], [None, 7, None, None], [-1.0, -2.0, -3.0, -4.0])
    tokens = np.arange(sum(lengths))
    of_tokens = LogprobsLists(np.column_stack([tokens, tokens + 1]), np.full((len(tokens), 2), -0.5), tokens)

    def counted(self: LogprobsProcessor, output: EngineCoreOutput) -> None:
        counts[-1] += output.new_logprobs.logprobs.size
        update(self, output)

    def answered(queue: RequestOutputCollector | None) -> Any:
        state = state_of(n=len(lengths), logprobs=1)
        state.queue, state._kept.output = queue, EngineCoreOutput("r-1", tokens.tolist(), of_tokens)
        return state.make_request_output([], None, FinishReason.STOP, None, {"trie_beam": {HYPOTHESES: sent}})

    expected = answered(None).outputs
    monkeypatch.setattr(LogprobsProcessor, "update_from_output", counted)
    output = answered(RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "r-1"))
    assert counts == [0]
    for one in vars(output).pop(search_state.MAKING):
        output.outputs += [] if one is None else [one]
        counts.append(0)
    assert sum(counts) == 2 * sum(lengths)
    assert max(counts) <= search_state.LOGPROBS_AT_ONCE
    assert output.outputs == expected


def test_no_data_of_a_request_stays_as_long_as_its_search() -> None:
    of = request(extra_args={"trie_beam_ticket": {"item_set": b"large"}})
    of.mm_features = ["pixels"]
    state = AnswerState(RequestState.from_new_request(None, of, None, None, 0, None, True, 1), of, None, N)
    assert state._request.mm_features is None
    assert state._request.sampling_params.extra_args == {"trie_beam_ticket": {}}
    assert of.mm_features == ["pixels"]


def test_nothing_comes_before_the_end() -> None:
    assert state_of(output_kind=RequestOutputKind.DELTA).make_request_output([4], None, None, None) is None
