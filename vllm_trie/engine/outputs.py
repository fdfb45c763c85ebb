"""Where the n hypotheses of a group go.

vLLM's front end turns a request with n > 1 into n requests `"{i}_{parent}"`. The first one is the
group; the others are return addresses and never reach vLLM's queues. They may arrive after the
search is over, and be aborted one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from vllm_trie.engine.answer_prefix import Part
from vllm_trie.engine.hypothesis import Hypothesis
from vllm_trie.messages import NO_HYPOTHESIS, GroupTicket


@dataclass
class _Delivery:
    """One group's return addresses, and its outputs once the search is over."""

    ticket: GroupTicket
    group_id: str
    waiting: dict[int, Request] = field(default_factory=dict)  # by index
    num_delivered: int = 0  # sent or withdrawn
    outputs: list[EngineCoreOutput] | None = None


class Mailbox:
    """Brings the outputs of groups to their return addresses."""

    def __init__(self) -> None:
        self._deliveries: dict[str, _Delivery] = {}  # by group id
        self._addresses: dict[str, tuple[_Delivery, int]] = {}  # by request id
        self._outbox: list[tuple[int, EngineCoreOutput]] = []  # client index, output

    def __bool__(self) -> bool:
        """Whether there is something to send."""
        return bool(self._outbox)

    def register(self, ticket: GroupTicket, request: Request) -> bool:
        """A request of a group has arrived. Returns whether it is the one that stands for the group."""
        index, group_id = ticket.address(request.request_id)
        if index == 0:
            self._deliveries[group_id] = _Delivery(replace(ticket, item_set=None), group_id)
        elif group_id not in self._deliveries or self.ticket(group_id).key != ticket.key:  # ids may be taken once more
            self._send(request, _aborted(is_first=False))  # with its group, before it came
            return False
        delivery = self._deliveries[group_id]
        delivery.waiting[index] = request
        self._addresses[request.request_id] = (delivery, index)
        if delivery.outputs is not None:
            self._send_outputs(delivery)
        return index == 0

    def waiting(self, request_id: str) -> Request | None:
        """The request of this id, if it waits for an output."""
        delivery, index = self._addresses.get(request_id, (None, 0))
        return delivery.waiting[index] if delivery is not None else None

    def withdraw(self, request_id: str) -> str | None:
        """An address is gone. Returns the request that ends with it in vLLM's scheduler, if any.

        That is the group when nobody waits for it any more, and the request itself if it has no
        part in any group.
        """
        if request_id not in self._addresses:  # None: aborted once more, while others wait for its group
            return None if request_id in self._deliveries else request_id
        delivery, index = self._addresses.pop(request_id)
        del delivery.waiting[index]
        delivery.num_delivered += 1
        if delivery.waiting:
            return None
        del self._deliveries[delivery.group_id]
        return delivery.group_id

    def abandoned_by(self, request_ids: Iterable[str] | None) -> list[str]:
        """The groups for which nobody waits any more once these requests are gone, or all of them."""
        gone = set(self._addresses if request_ids is None else request_ids)
        deliveries = {id(of): of for of, _ in (self._addresses[id_] for id_ in gone & self._addresses.keys())}.values()
        return [of.group_id for of in deliveries if gone.issuperset(one.request_id for one in of.waiting.values())]

    def answer(self, group_id: str, outputs: list[EngineCoreOutput]) -> None:
        """Send all who wait for a group what it has found so far. `withdraw` is to follow."""
        for index, request in self._deliveries[group_id].waiting.items():
            self._send(request, outputs[index])

    def withdraw_all(self) -> list[Request]:
        """Every group ends unfinished. Returns the requests that waited beside those that stand for groups."""
        waiting = [request for d in self._deliveries.values() for index, request in d.waiting.items() if index > 0]
        self._deliveries.clear()
        self._addresses.clear()
        return waiting

    def refuse(self, request: Request, message: str) -> None:
        """Send a request back that cannot become part of a group."""
        self._send(request, error_output(message))

    def post_part(self, group_id: str, output: EngineCoreOutput) -> None:
        """Send the next part of a search's one output."""
        self._send(self._deliveries[group_id].waiting[0], output)

    def post(self, group_id: str, outputs: list[EngineCoreOutput], stock: EngineCoreOutput | None = None) -> None:
        """A search is over: send its n outputs, to late addresses when they arrive.

        Args:
            stock: What vLLM made for the group's own request. Its timing goes with all outputs, what is
                counted (the prompt, preemptions) with the last, from which vLLM makes the user's output.
        """
        delivery = self._deliveries[group_id]
        delivery.outputs = outputs
        if stock is not None:
            for output in outputs:
                output.events = [e for e in stock.events or () if e.type is not EngineCoreEventType.PREEMPTED]
            outputs[-1].events, outputs[-1].prefill_stats = stock.events, stock.prefill_stats
        self._send_outputs(delivery)

    def post_error(self, group_id: str, message: str) -> None:
        """A search cannot go on: tell every address why."""
        self.post(group_id, [error_output(message) for _ in range(self.ticket(group_id).n)])

    def ticket(self, group_id: str) -> GroupTicket:
        """The ticket of a group's request."""
        return self._deliveries[group_id].ticket

    def empty(self) -> list[tuple[int, EngineCoreOutput]]:
        """Take everything there is to send, as (client index, output)."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def _send_outputs(self, delivery: _Delivery) -> None:
        assert delivery.outputs is not None
        for index, request in delivery.waiting.items():
            self._send(request, delivery.outputs[index])
            del self._addresses[request.request_id]
        delivery.num_delivered += len(delivery.waiting)
        delivery.waiting.clear()
        if delivery.num_delivered == delivery.ticket.n:
            del self._deliveries[delivery.group_id]

    def _send(self, request: Request, output: EngineCoreOutput) -> None:
        output.request_id = request.request_id
        output.trace_headers = request.trace_headers
        self._outbox.append((request.client_index, output))


def outputs_of(best: Sequence[Hypothesis], count: int, eos_token_id: int | None) -> list[EngineCoreOutput]:
    """So many outputs of a search, not addressed yet; some stand for none where bans leave fewer hypotheses."""
    outputs = [hypothesis_output(hypothesis, eos_token_id) for hypothesis in best[:count]]
    none = {"new_logprobs": _sum_alone(math.nan), "finish_reason": FinishReason.STOP, "stop_reason": NO_HYPOTHESIS}
    return outputs + [EngineCoreOutput(request_id="", new_token_ids=[], **none) for _ in range(count - len(best))]


def outputs_so_far(best: Sequence[Hypothesis], count: int, eos_token_id: int | None) -> list[EngineCoreOutput]:
    """So many outputs of a search that was aborted, not addressed yet; some stand for nothing."""
    outputs = [hypothesis_output(hypothesis, eos_token_id) for hypothesis in best[:count]]
    return outputs + [_aborted(is_first=index == 0) for index in range(len(outputs), count)]


def _aborted(is_first: bool) -> EngineCoreOutput:
    """What stands for a hypothesis of a search that has found none yet; or for a further one, where there are fewer."""
    stop_reason = None if is_first else NO_HYPOTHESIS
    return EngineCoreOutput("", [], finish_reason=FinishReason.ABORT, stop_reason=stop_reason)


def hypothesis_output(hypothesis: Hypothesis, eos_token_id: int | None) -> EngineCoreOutput:
    """One hypothesis as vLLM's front end expects it, not addressed yet.

    Args:
        hypothesis: What to return.
        eos_token_id: The stop token that vLLM does not report as a stop reason.
    """
    stopped_by = hypothesis.stopped_by
    # Where a stop string ended it, the front end finds that string in the text, and says so.
    finish_reason = FinishReason.STOP if _has_ended(hypothesis) else FinishReason.LENGTH
    return EngineCoreOutput(
        request_id="",
        new_token_ids=hypothesis.token_ids,
        new_logprobs=_logprobs(hypothesis),
        finish_reason=FinishReason.ABORT if hypothesis.is_running else finish_reason,
        stop_reason=None if stopped_by == eos_token_id else stopped_by,
    )


def part_output(part: Part, request: Request, num_cached_tokens: int) -> EngineCoreOutput:
    """The next tokens of a search's one output, not addressed yet; with the first come timing and counts, as in vLLM.

    Args:
        num_cached_tokens: Of the request's prompt, those that the prefix cache holds now.
    """
    if (prefill_stats := request.take_prefill_stats()) is not None:
        prefill_stats.finalize(num_cached_tokens)
    return EngineCoreOutput(
        request_id="",
        new_token_ids=part.token_ids,
        new_logprobs=_logprobs(part),
        events=request.take_events(),
        prefill_stats=prefill_stats,
    )


def compact_answer(hypotheses: Sequence[Hypothesis], max_length: int) -> dict[str, list[Any]]:
    """All hypotheses of a search as lists, best first, for its one output: see `entrypoints.compact`."""
    return {
        "token_ids": [hypothesis.token_ids for hypothesis in hypotheses],
        "cumulative_logprobs": [hypothesis.sum_logprobs for hypothesis in hypotheses],
        "scores": [hypothesis.score for hypothesis in hypotheses],
        "finish_reasons": [_compact_reason(hypothesis, max_length) for hypothesis in hypotheses],
    }


def _compact_reason(hypothesis: Hypothesis, max_length: int) -> str:
    if hypothesis.is_running:
        return "abort"
    return "stop" if _has_ended(hypothesis) or len(hypothesis.token_ids) < max_length else "length"


def scores_and_stops(hypotheses: Sequence[Hypothesis]) -> list[dict[str, Any]]:
    """Scores, and the stop tokens that ended hypotheses, best first: vLLM's outputs have no room for these.

    `entrypoints.beam_results` adds the rest.
    """
    return [{"sequence_score": hypothesis.score, "matched": hypothesis.stopped_by} for hypothesis in hypotheses]


def _has_ended(hypothesis: Hypothesis) -> bool:
    """By a token, or with its items."""
    return hypothesis.stopped_by is not None or hypothesis.is_complete


def error_output(message: str) -> EngineCoreOutput:
    """The end of a group that cannot go on, not addressed yet; `message` becomes the stop reason."""
    return EngineCoreOutput(request_id="", new_token_ids=[], finish_reason=FinishReason.ERROR, stop_reason=message)


def _logprobs(of: Hypothesis | Part) -> LogprobsLists:
    """What is reported of each token, or their sum alone (see `entrypoints.logprobs`)."""
    if not of.reports:
        return _sum_alone(of.sum_logprobs)
    token_ids, logprobs, ranks = zip(*of.reports, strict=True)
    return LogprobsLists(np.stack(token_ids), np.stack(logprobs), np.array(ranks, dtype=np.int32))


def take_output(request_id: str, outputs: dict[int, EngineCoreOutputs]) -> EngineCoreOutput:
    """Take from among all outputs that of a request that has finished."""
    for of_client in outputs.values():
        for index, output in enumerate(of_client.outputs):
            if output.request_id == request_id:
                return of_client.outputs.pop(index)
    raise LookupError(f"vLLM made no output for the finished group {request_id}")


def _sum_alone(total: float) -> LogprobsLists:
    """A sum of log-probabilities, alone; NaN where there is none (see `entrypoints.logprobs`)."""
    nothing = np.zeros((0, 0), dtype=np.int32)
    return LogprobsLists(nothing, np.array([[total]]), nothing)
