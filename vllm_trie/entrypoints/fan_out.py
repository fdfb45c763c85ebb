"""Data parallel serving: the n requests of one group go to one engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import DPLBAsyncMPClient

from vllm_trie.compat.patch import Patch
from vllm_trie.messages import GroupTicket

choose_engine = Patch("vllm.v1.engine.core_client:DPLBAsyncMPClient", "get_core_engine_for_request")


def keep_groups_together() -> None:
    """From now on, the load balancers of this process choose one engine per group."""
    if not choose_engine.is_applied:
        choose_engine.apply(_by_group(DPLBAsyncMPClient.get_core_engine_for_request))


def _by_group(original: Callable[..., bytes]) -> Callable[..., bytes]:
    ranks: dict[str, list[int]] = {}  # by ticket key: the rank, once for each request that is yet to come

    @functools.wraps(original)
    def get_core_engine_for_request(self: Any, request: EngineCoreRequest, **kwargs: Any) -> bytes:
        ticket = GroupTicket.of(request.sampling_params)
        if ticket is None:
            return original(self, request, **kwargs)
        if ticket.key in ranks:
            request.data_parallel_rank = ranks[ticket.key].pop()
        engine = original(self, request, **kwargs)
        if ticket.key not in ranks:
            ranks[ticket.key] = [self.core_engines.index(engine)] * (ticket.n - 1)
        if not ranks[ticket.key]:
            del ranks[ticket.key]
        return engine

    return get_core_engine_for_request
