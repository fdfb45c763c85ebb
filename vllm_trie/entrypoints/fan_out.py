"""The n requests that vLLM makes of one group: they go to one engine, and one of them carries the images for all."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreRequest

from vllm_trie.compat.patch import wraps
from vllm_trie.messages import GroupTicket

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.engine.parallel_sampling import ParentRequest

MOST_RANKS = 4096  # of groups whose requests are on their way; a client that leaves may keep some from coming

_ranks: dict[str, list[int]] = {}  # by ticket key: the rank, once for each request that is yet to come


@wraps("add_request", "vllm.v1.engine.output_processor:OutputProcessor")
def add_request(
    original: Callable[..., None],
    self: OutputProcessor,
    request: EngineCoreRequest,
    prompt: str | None,
    parent: ParentRequest | None = None,
    index: int = 0,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Of a group's requests only the one that stands for it carries images, and a set of items."""
    params = request.sampling_params
    if index > 0 and (ticket := GroupTicket.of(params)) is not None:
        request.mm_features = None
        if ticket.item_set is not None:
            request.sampling_params = copy(params)
            ticket.without_items(request.sampling_params)
    original(self, request, prompt, parent, index, *args, **kwargs)


@wraps("get_core_engine_for_request", "vllm.v1.engine.core_client:DPLBAsyncMPClient")
def choose_engine(original: Callable[..., bytes], self: Any, request: EngineCoreRequest, **kwargs: Any) -> bytes:
    """Load balancers choose one engine per group."""
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
    if len(_ranks) > MOST_RANKS:
        del _ranks[next(iter(_ranks))]
    return engine
