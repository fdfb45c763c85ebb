"""A KV connector of the tests' own: it keeps blocks of prompts in this process, and is as slow and faulty as told.

Engines name it by `memory_config`. As with NIXL, a request of one token with `do_remote_decode` hands its prompt over,
the last block too, and one with the parameters that it answers takes it. All others save and find full blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.request import RequestStatus

JUNK = 1e4  # what a load that fails leaves in its blocks

Content = list[torch.Tensor]  # of a block, by layer


@dataclass
class Memory:
    """What connectors keep, what they are told to do, and what they saw."""

    blocks: dict[tuple[int, ...], Content] = field(default_factory=dict)  # by all tokens up to the block's end
    handed_over: dict[str, list[Content]] = field(default_factory=dict)  # by request: the blocks of its prompt
    steps_to_load: int = 0  # 0: with the step that computes what follows
    steps_to_save: int = 0  # that blocks are read late, whoever may have them by then
    steps_held_back: int = 0  # in which a request does not learn how much there is of it
    loads_to_fail: int = 0
    first_to_fail: int = 0  # of the blocks of such a load
    fails_by_blocks: bool = True  # and not by the request
    scheduled: list[dict[str, int]] = field(default_factory=list)  # in each step, as shown
    finished: list[tuple[str, list[int], int]] = field(default_factory=list)  # tokens and number of blocks at their end
    delayed: set[str] = field(default_factory=set)  # requests whose blocks are to be freed when they are saved
    ended: set[str] = field(default_factory=set)  # as the worker heard
    num_loaded: int = 0  # blocks
    num_asked: int = 0  # times, how much there is of a request


MEMORY = Memory()


def forget_memory() -> Memory:
    MEMORY.__init__()  # type: ignore[misc]
    return MEMORY


def memory_config(role: str = "kv_both", name: str = "MemoryConnector", **options: Any) -> KVTransferConfig:
    """The configuration of an engine that has it."""
    return KVTransferConfig(kv_connector=name, kv_role=role, kv_connector_module_path=__name__, **options)


@dataclass
class Load:
    request_id: str
    places: list[tuple[int, Any]]  # blocks, and what each is to hold
    steps_left: int
    first_to_fail: float = math.inf  # of the blocks

    @property
    def fails(self) -> bool:
        return self.first_to_fail < math.inf


@dataclass
class Save:
    request_id: str
    places: list[tuple[int, Any]]  # blocks, and under which key each is kept; None: it is handed over
    steps_left: int


@dataclass
class MemoryMetadata(KVConnectorMetadata):
    loads: list[Load]
    saves: list[Save]
    preempted: set[str]


class MemoryStats(KVConnectorStats):
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return MemoryStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return self.data

    def is_empty(self) -> bool:
        return not self.data


class MemoryConnector(KVConnectorBase_V1, SupportsHMA):
    """Its scheduler's and its worker's side."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.block_size = self._vllm_config.cache_config.block_size
        self.requests: dict[str, Any] = {}
        self.num_local: dict[str, int] = {}  # tokens that are computed before those to be loaded
        self.block_ids: dict[str, list[int]] = {}
        self.num_saved: dict[str, int] = {}  # blocks, the first ones
        self.times_held_back: Counter[str] = Counter()
        self.new_loads: list[Load] = []
        self.new_saves: list[Save] = []
        self.loads: list[Load] = []
        self.saves: list[Save] = []
        self.failed_blocks: set[int] = set()

    # The scheduler's side.

    def on_new_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        MEMORY.num_asked += 1
        if self.times_held_back[request.request_id] < MEMORY.steps_held_back:
            self.times_held_back[request.request_id] += 1
            return None, False
        num_found = len(self._found(request)) * self.block_size
        num_found = min(num_found, request.num_tokens if self._is_handed_over(request) else request.num_tokens - 1)
        if not MEMORY.steps_to_load:
            num_found -= num_found % self.block_size
        self.num_local[request.request_id] = num_computed_tokens
        num_new = max(num_found - num_computed_tokens, 0)
        return num_new, num_new > 0 and MEMORY.steps_to_load > 0

    def _is_handed_over(self, request: Any) -> bool:
        return bool((request.kv_transfer_params or {}).get("do_remote_prefill"))

    def _found(self, request: Any) -> list[Content]:
        """What there is of a request's first blocks."""
        if self._is_handed_over(request):
            return MEMORY.handed_over[request.kv_transfer_params["remote_request"]]
        tokens, found = tuple(request.all_token_ids), []
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            if tokens[:end] not in MEMORY.blocks:
                break
            found.append(MEMORY.blocks[tokens[:end]])
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        (held,), found = blocks.blocks, self._found(request)
        first = self.num_local[request.request_id] // self.block_size
        end = -(-(self.num_local[request.request_id] + num_external_tokens) // self.block_size)
        places = [(held[place].block_id, found[place]) for place in range(first, end)]
        fails = MEMORY.loads_to_fail > 0
        MEMORY.loads_to_fail -= fails
        first_to_fail = MEMORY.first_to_fail if fails else math.inf
        self.new_loads.append(Load(request.request_id, places, MEMORY.steps_to_load, first_to_fail))

    def build_connector_meta(self, scheduler_output: Any) -> MemoryMetadata:
        scheduled = scheduler_output.num_scheduled_tokens
        MEMORY.scheduled.append(dict(scheduled))
        new = {data.req_id for data in scheduler_output.scheduled_new_reqs}
        for request_id, block_ids, _ in yield_req_data(scheduler_output):
            if request_id in new:
                self.block_ids[request_id], self.num_saved[request_id] = [], 0
            self.block_ids[request_id] += block_ids[0] if block_ids else []
        for request_id, num_tokens in scheduled.items():
            request = self.requests[request_id]
            num_full = min(request.num_computed_tokens + num_tokens, len(request.all_token_ids)) // self.block_size
            tokens = tuple(request.all_token_ids)
            ends = range(self.num_saved[request_id] + 1, num_full + 1)
            places = [(self.block_ids[request_id][end - 1], tokens[: end * self.block_size]) for end in ends]
            places = [(block_id, key) for block_id, key in places if key not in MEMORY.blocks]
            if places:
                self.new_saves.append(Save(request_id, places, MEMORY.steps_to_save))
            self.num_saved[request_id] = num_full
        metadata = MemoryMetadata(self.new_loads, self.new_saves, scheduler_output.preempted_req_ids or set())
        self.new_loads, self.new_saves = [], []
        return metadata

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        tokens = list(request.all_token_ids[: request.num_computed_tokens])
        MEMORY.finished.append((request.request_id, tokens, len(block_ids)))
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
            places = [(block_id, None) for block_id in block_ids]
            self.new_saves.append(Save(request.request_id, places, MEMORY.steps_to_save))
            MEMORY.delayed.add(request.request_id)
            return True, {"do_remote_prefill": True, "remote_request": request.request_id}
        is_delayed = MEMORY.steps_to_save > 0 and request.request_id in self.block_ids
        if is_delayed:
            MEMORY.delayed.add(request.request_id)
        return is_delayed, {"num_tokens": len(tokens)} if params else None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        return bool(self.new_saves)

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        self.loads += metadata.loads
        self._load([load for load in self.loads if load.steps_left == 0])

    def _load(self, loads: list[Load]) -> None:
        for load in loads:
            for place, (block_id, content) in enumerate(load.places):
                is_lost = place >= load.first_to_fail
                for cache, layer in zip(self.caches, content, strict=True):
                    cache[block_id] = JUNK if is_lost else layer
                MEMORY.num_loaded += not is_lost
                if is_lost and MEMORY.fails_by_blocks:
                    self.failed_blocks.add(block_id)
            self.loads.remove(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        assert self.has_connector_metadata()

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        assert self.has_connector_metadata()

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        self.saves = [save for save in self.saves if save.request_id not in metadata.preempted]
        self.saves += metadata.saves

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        MEMORY.ended |= finished_req_ids
        due = [save for save in self.saves if save.steps_left == 0]
        for save in due:
            for block_id, key in save.places:
                content = [cache[block_id].clone() for cache in self.caches]
                if key is None:
                    MEMORY.handed_over.setdefault(save.request_id, []).append(content)
                else:
                    MEMORY.blocks[key] = content
        self.saves = [save for save in self.saves if save.steps_left > 0]
        for save in self.saves:
            save.steps_left -= 1
        loaded = [load for load in self.loads if load.steps_left == 1]
        self._load(loaded)
        for load in self.loads:
            load.steps_left -= 1
        results = KVConnectorTransferResults(finished_recving={load.request_id for load in loaded})
        if not MEMORY.fails_by_blocks:
            results.failed_recving = {load.request_id for load in loaded if load.fails}
        saving = {save.request_id for save in self.saves}
        results.finished_sending = (MEMORY.delayed & MEMORY.ended) - saving
        MEMORY.delayed -= results.finished_sending
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return MemoryStats(data={"steps": 1}) if self.role == KVConnectorRole.WORKER else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return MemoryStats(data=data or {})


class OtherMemoryConnector(MemoryConnector):
    """Another one, as `MultiConnector` has several."""
