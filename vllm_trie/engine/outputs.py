"""Makes the outputs that the engine sends for a search: one with all hypotheses, or the parts of a stream."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from vllm_trie.engine.answer_prefix import EngineAnswerPart
from vllm_trie.engine.group import BeamGroup
from vllm_trie.engine.hypothesis import GroupHypotheses
from vllm_trie.messages import HYPOTHESES, NO_HYPOTHESIS, SentHypotheses
from vllm_trie.options import PLUGIN_NAME

if TYPE_CHECKING:
    from vllm_trie.trie.traced import TracedTrie

NEVER_SCHEDULED = {RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR}


class EngineOutbox(list[tuple[int, EngineCoreOutput]]):
    """Outputs that vLLM's scheduler does not make: parts of streams, and those of searches that end outside its loop.

    Each is stored with the index of its client.
    """

    def post(self, request: Request, output: EngineCoreOutput) -> None:
        """Queue an output for the client of a request, with the events for vLLM's metrics."""
        output.request_id, output.trace_headers = request.request_id, request.trace_headers
        if output.events is None:
            output.events = _take_engine_events(request)
        self.append((request.client_index, output))

    def empty_into(self, outputs: dict[int, EngineCoreOutputs], lists_finished: bool) -> None:
        """Move all queued outputs into a step's outputs, by client.

        Args:
            lists_finished: Also list the requests that end, for a load balancer that counts them.
        """
        for client_index, output in self:
            of_client = outputs.setdefault(client_index, EngineCoreOutputs())
            of_client.outputs.append(output)
            if lists_finished and output.finished:
                of_client.finished_requests = (of_client.finished_requests or set()) | {output.request_id}
        self.clear()


def engine_answer_output(
    best: GroupHypotheses, num_outputs: int, eos_token_id: int | None, is_aborted: bool = False
) -> EngineCoreOutput:
    """The answer of a finished or aborted search, without its request id.

    An aborted search may have found nothing yet. `SentHypotheses` keeps the hypotheses' own finish reasons, by which
    vLLM makes their texts, and marks them as aborted. A single one that has ended keeps its own in the output, too.

    Args:
        best: Its hypotheses; fewer than outputs if bans leave fewer.
        num_outputs: Outputs of the request. A single one has vLLM's usual form; several are concatenated, and
            `SentHypotheses` separates them.
        eos_token_id: The stop token that vLLM does not report as a stop reason.
        is_aborted: Whether the search was aborted.
    """
    output = EngineCoreOutput("", [])
    if not best:
        output.new_logprobs = _engine_output_logprob_sum(math.nan)
        nothing = (FinishReason.ABORT, None) if is_aborted else (FinishReason.STOP, NO_HYPOTHESIS)
        output.finish_reason, output.stop_reason = nothing
        return output
    best = best.first(num_outputs)
    # If a stop string ended a hypothesis, the front end finds it in the text and sets the stop reason.
    reasons = np.where(best.has_ended, FinishReason.STOP, FinishReason.LENGTH).tolist()
    stops, sums = best.stop_tokens(eos_token_id), best.sum_logprobs.tolist()
    output.new_token_ids = [*chain.from_iterable(best.token_ids)]
    output.finish_reason, output.stop_reason = FinishReason(reasons[0]), stops[0]
    if is_aborted and (num_outputs > 1 or not best.has_ended[0]):
        output.finish_reason = FinishReason.ABORT
    if best.reports is not None and len(best.reports.ranks):
        output.new_logprobs = LogprobsLists(*best.reports)
    elif num_outputs == 1:
        output.new_logprobs = _engine_output_logprob_sum(sums[0])
    if is_aborted or num_outputs > 1:
        sent = SentHypotheses(best.lengths.tolist(), reasons, stops, sums, are_aborted=is_aborted)
        add_to_engine_output(output, {HYPOTHESES: sent})
    return output


def add_to_engine_output(output: EngineCoreOutput, more: Mapping[str, Any]) -> None:
    """Add data to an output, in its only free-form field, next to the parameters of a KV connector."""
    if more:
        sent = output.kv_transfer_params or {}
        output.kv_transfer_params = {**sent, PLUGIN_NAME: {**sent.get(PLUGIN_NAME, {}), **more}}


def add_engine_answer(
    output: EngineCoreOutput, group: BeamGroup, best: GroupHypotheses, block_size: int, is_aborted: bool = False
) -> None:
    """Add further data that the request asks for to the output of a search.

    Args:
        best: The returned hypotheses, whole even if a stream has sent a part.
        block_size: Tokens of a KV block.
        is_aborted: Whether the search was aborted.
    """
    plan = group.plan
    answer = group.forests.report(group.counts)
    if plan.params.accept == "top_k":
        answer["is_exact"] = False
    if plan.params.compact:
        answer |= compact_engine_answer(best, plan.max_length, is_aborted)
    answer |= plan.catalog.answer(plan.stop_token_ids, best.token_ids)
    if plan.params.beam_results:
        answer["beam_results"] = engine_scores_and_stops(best)
    if group.traced:
        answer["trace"] = group_trace(group, group.traced, best, block_size)
    add_to_engine_output(output, answer)


def group_trace(group: BeamGroup, trie: TracedTrie, best: GroupHypotheses, block_size: int) -> dict[str, Any]:
    """The trace of a finished search, see `vllm_trie.trace`; `trace/texts.py` adds the texts.

    Args:
        trie: Of the group.
        best: The returned hypotheses.
        block_size: Tokens of a KV block.
    """
    returned = [trie.end(~leaf) if leaf < 0 else leaf for leaf in best.leaves.tolist()]
    own = {"prompt_length": group.plan.prompt_length, "block_size": block_size, "texts": []}
    return {**own, **trie.as_dict(returned)}


def engine_part_output(part: EngineAnswerPart, request: Request, num_cached_tokens: int) -> EngineCoreOutput:
    """The next tokens of a streamed answer, without its request id; the first part has prefill counts, as in vLLM.

    Args:
        num_cached_tokens: Tokens of the prompt that the prefix cache holds now.
    """
    prefill_stats = take_group_prefill_stats(request, num_cached_tokens)
    return EngineCoreOutput("", part.token_ids, _engine_output_logprobs(part), prefill_stats=prefill_stats)


def take_group_prefill_stats(request: Request, num_cached_tokens: int) -> PrefillStats | None:
    """vLLM's statistics of a computed prompt, for the first output after that; None for further outputs.

    Args:
        num_cached_tokens: Tokens of the prompt that the prefix cache holds now.
    """
    if (stats := request.take_prefill_stats()) is not None:
        stats.finalize(num_cached_tokens)
    return stats


def compact_engine_answer(found: GroupHypotheses, max_length: int, is_aborted: bool = False) -> dict[str, list[Any]]:
    """All hypotheses of a search as lists, best first, for `compact=True`: see `entrypoints.answers.compact`."""
    reasons = np.where(found.has_ended | (found.lengths < max_length), "stop", "length")
    return {
        "token_ids": found.token_ids,
        "cumulative_logprobs": found.sum_logprobs.tolist(),
        "scores": found.scores.tolist(),
        "finish_reasons": len(found) * ["abort"] if is_aborted else reasons.tolist(),
    }


def engine_scores_and_stops(found: GroupHypotheses) -> list[dict[str, Any]]:
    """Scores and stop tokens of hypotheses, best first, which vLLM's outputs have no fields for.

    `entrypoints.answers.beam_results` adds the rest.
    """
    pairs = zip(found.scores.tolist(), found.stop_tokens(), strict=True)
    return [{"sequence_score": score, "matched": token} for score, token in pairs]


def engine_error_output(message: str) -> EngineCoreOutput:
    """The last output of a search that cannot go on, without its request id; `message` becomes the stop reason."""
    return EngineCoreOutput(request_id="", new_token_ids=[], finish_reason=FinishReason.ERROR, stop_reason=message)


def _engine_output_logprobs(part: EngineAnswerPart) -> LogprobsLists:
    """The log-probabilities of the tokens, or only their sum (see `entrypoints.answers.logprobs`)."""
    return _engine_output_logprob_sum(part.sum_logprobs) if part.reports is None else LogprobsLists(*part.reports)


def take_engine_output(request_id: str, outputs: dict[int, EngineCoreOutputs]) -> EngineCoreOutput:
    """Remove the output of a finished request from a step's outputs, and return it."""
    for of_client in outputs.values():
        for index, output in enumerate(of_client.outputs):
            if output.request_id == request_id:
                return of_client.outputs.pop(index)
    raise LookupError(f"vLLM made no output for the finished group {request_id}")


def _take_engine_events(request: Request) -> list[EngineCoreEvent] | None:
    """Take the events that vLLM recorded for a request; one that was never scheduled leaves the queue now."""
    if request.status in NEVER_SCHEDULED:
        if not request.events:  # refused
            request.record_event(EngineCoreEventType.QUEUED)
        request.record_event(EngineCoreEventType.SCHEDULED)
    events: list[EngineCoreEvent] | None = request.take_events()
    return events


def _engine_output_logprob_sum(total: float) -> LogprobsLists:
    """A sum of log-probabilities, NaN if there is none, in vLLM's format (see `entrypoints.answers.logprobs`)."""
    nothing = np.zeros((0, 0), dtype=np.int32)
    return LogprobsLists(nothing, np.array([[total]]), nothing)
