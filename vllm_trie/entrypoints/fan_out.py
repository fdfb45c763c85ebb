"""Data parallel serving: the n requests of one group go to one engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreRequest

from vllm_trie.compat.patch import Patch
from vllm_trie.messages import GroupTicket

choose_engine = Patch("vllm.v1.engine.core_client:DPLBAsyncMPClient", "get_core_engine_for_request")


_ranks: dict[str, list[int]] = {}  # by ticket key: the rank, once for each request that is yet to come


def keep_groups_together() -> None:
    """From now on, the load balancers of this process choose one engine per group."""
    choose_engine.wrap(_choose_by_group)


def _choose_by_group(original: Callable[..., bytes], self: Any, request: EngineCoreRequest, **kwargs: Any) -> bytes:
    ticket = GroupTicket.of(request.sampling_params)
    if ticket is None:
        return original(self, request, **kwargs)
    if ticket.key in _ranks:
        request.data_parallel_rank = _ranks[ticket.key].pop()
    engine = original(self, request, **kwargs)
    if ticket.key not in _ranks:
        _ranks[ticket.key] = [self.core_engines.index(engine)] * (ticket.n - 1)
    if not _ranks[ticket.key]:
        del _ranks[ticket.key]
    return engine
