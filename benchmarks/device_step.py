"""A step of selection on a device, with all that it knows of vLLM's runner, in vLLM's layouts.

KV caches are permuted views, and the tokens of all slots lie in the host's memory where the device can map it. vLLM
itself need not be there, see `stand_ins`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.stand_ins import stand_in_for_vllm

stand_in_for_vllm()

from vllm_trie.catalog import Catalog  # noqa: E402
from vllm_trie.messages import CatalogChanges, GroupStep, Resumed  # noqa: E402
from vllm_trie.search.beams import SearchBeams  # noqa: E402
from vllm_trie.search.constraints.catalog import ItemConstraint  # noqa: E402
from vllm_trie.search.constraints.stops import StopConstraints  # noqa: E402
from vllm_trie.search.filters import SearchFilters  # noqa: E402
from vllm_trie.search.rules import SearchInputs, SearchPhase, SearchRules  # noqa: E402
from vllm_trie.search.step import take_packed_search_step  # noqa: E402
from vllm_trie.search.strategies.best import BestStrategy  # noqa: E402
from vllm_trie.search.strategies.in_groups import DiverseGroupsStrategy  # noqa: E402
from vllm_trie.worker.kernels import KernelStepSizes  # noqa: E402
from vllm_trie.worker.kernels import slots as slots_kernel  # noqa: E402
from vllm_trie.worker.kernels.tiles import KernelLogits  # noqa: E402
from vllm_trie.worker.kv.kv_moves import KVFork, fork_kv, kv_rows_of_groups  # noqa: E402
from vllm_trie.worker.rows.catalogs import RowCatalogs  # noqa: E402
from vllm_trie.worker.rows.rows import (  # noqa: E402
    BatchRows,
    GroupRows,
    Rows,
)
from vllm_trie.worker.select.by_kernels import select_by_kernels  # noqa: E402
from vllm_trie.worker.select.select import Selector  # noqa: E402
from vllm_trie.worker.select.selection_graphs import SelectionGraphCapture, SelectionGraphs  # noqa: E402
from vllm_trie.worker.step_context import RunnerStepContext  # noqa: E402

BLOCK_SIZE, NUM_PROMPT, NUM_GENERATED, LENGTH = 16, 500, 37, 576  # tokens
STOP_TOKEN_ID, NUM_STOPS, DIVERSITY, NUM_LOGPROBS, PENALTY = 2, 6, 0.5, 5, 0.125
TEMPERATURE, MIN_P, TOP_P = 0.7, 0.1, 0.9
ITEMS, ITEM_LENGTH = 20_000, 3
SPREAD = 8  # of the beams' scores: so that some have several children


class Sizes(NamedTuple):
    """Of a model."""

    vocab_size: int = 151_936
    num_layers: int = 4
    num_kv_heads: int = 8
    head_size: int = 128


class Shape(NamedTuple):
    """Of a batch: groups that search alike, each after so many ordinary rows."""

    search: str
    width: int
    num_groups: int = 1
    num_ordinary: int = 0


def rules_of(search: str, width: int, catalog: str) -> SearchRules:
    """Those of a kind of search; `catalog`: a digest."""
    plain = SearchRules(width, BestStrategy(), StopConstraints((STOP_TOKEN_ID,)))
    others: dict[str, dict[str, Any]] = {
        "plain": {},
        "many stop tokens": {"stops": StopConstraints(tuple(range(STOP_TOKEN_ID, STOP_TOKEN_ID + NUM_STOPS)))},
        'semantics="vllm"': {"strategy": BestStrategy("vllm")},
        "controlled": {"is_controlled": True},
        "log-probabilities": {"num_logprobs": NUM_LOGPROBS},
        "temperature and min_p": {"filters": SearchFilters(TEMPERATURE, MIN_P)},
        "min_p and top_p": {"filters": SearchFilters(min_p=MIN_P, top_p=TOP_P)},
        "along a catalog": {"constraints": (ItemConstraint(catalog),)},
        "in 2 groups of beams": {"strategy": DiverseGroupsStrategy(2, DIVERSITY, None)},
    }
    return plain._replace(**others[search])


class _Mapped:
    """Pinned memory, described as that of a device."""

    def __init__(self, on_host: torch.Tensor) -> None:
        self.on_host, kind = on_host, on_host.numpy().dtype.str
        place = {"data": (on_host.data_ptr(), False), "shape": tuple(on_host.shape), "typestr": kind, "version": 3}
        self.__cuda_array_interface__ = place


def host_mapped(content: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same content in the host's memory, as a tensor of the device, as vLLM has it."""
    if device.type != "cuda":
        return content.clone()
    pinned = content.pin_memory()
    mapped = torch.as_tensor(_Mapped(pinned), device=device)
    assert mapped.data_ptr() == pinned.data_ptr(), "torch has copied what it was to map"
    _kept.append(pinned)
    return mapped


_kept: list[torch.Tensor] = []  # what devices have mapped


class Sampler:
    """In the place of vLLM's: it takes a little off for each time that a token has come."""

    def __init__(self, counts: torch.Tensor) -> None:
        self.penalties_state = SimpleNamespace(output_bin_counts=counts)
        self.logits_processors: list[Any] = []

    def apply_sampling_params(self, logits: torch.Tensor, slots: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return logits.float() - PENALTY * self.penalties_state.output_bin_counts[slots]


class DeviceStep:
    """Groups with equal rules in one batch, the same wherever they are: in each all rows have just been computed.

    Args:
        shape: Theirs.
        sizes: Of the model.
        device: Where they are.
        seed: Of all content.
    """

    def __init__(self, shape: Shape, sizes: Sizes, device: torch.device, seed: int = 0) -> None:
        self.shape, self.device = shape, device
        random, choose = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
        self._random = random
        vocab_size, num_groups, width = sizes.vocab_size, shape.num_groups, shape.width
        num_rows = num_groups * (shape.num_ordinary + width)
        self.num_slots = 2 * num_rows
        self._in_batch = choose.permutation(self.num_slots)[:num_rows].reshape(num_groups, -1)
        catalog = self._catalog(choose, vocab_size)
        self.rules = rules_of(shape.search, width, catalog.digest)
        starts = NUM_PROMPT if self.rules.items is None else NUM_PROMPT + NUM_GENERATED - 1
        self.num_tokens = NUM_PROMPT + NUM_GENERATED + np.arange(num_groups) % 2 * (self.rules.items is None)
        self.logits = torch.randn(num_rows, vocab_size, generator=random).mul_(3).bfloat16().to(device)
        counts = torch.randint(2, (self.num_slots, vocab_size if self.rules.is_controlled else 1), generator=random)
        self.sampler = Sampler(counts.int().to(device))
        self._lay_out_rows(sizes, starts)
        self._enter_groups(catalog, starts)
        self._initial = self.snapshot()

    @staticmethod
    def _catalog(choose: np.random.Generator, vocab_size: int) -> Catalog:
        items = choose.integers(STOP_TOKEN_ID + 1, min(vocab_size, 256 + STOP_TOKEN_ID), (ITEMS, ITEM_LENGTH))
        return Catalog.from_sequences(items[: 30 * vocab_size].tolist())

    def _lay_out_rows(self, sizes: Sizes, num_prompt: int) -> None:
        num_slots, random = self.num_slots, self._random
        columns, shared = LENGTH // BLOCK_SIZE, num_prompt // BLOCK_SIZE
        num_own = columns - shared
        num_blocks = num_slots * num_own + shared
        tokens = torch.randint(sizes.vocab_size, (num_slots, LENGTH), generator=random, dtype=torch.int32)
        tokens[:, :num_prompt] = tokens[:1, :num_prompt]
        blocks = torch.randperm(num_blocks, generator=random).int()
        table = torch.hstack([blocks[:shared].repeat(num_slots, 1), blocks[shared:].view(num_slots, num_own)])
        layout = num_blocks, BLOCK_SIZE, sizes.num_kv_heads, 2 * sizes.head_size
        content = torch.randn(num_blocks * BLOCK_SIZE, generator=random).bfloat16()
        ramp = torch.arange(layout[2] * layout[3]).bfloat16()
        of_layer = (content[:, None] + ramp).view(layout).to(self.device)
        self.caches = [(of_layer + number).transpose(1, 2) for number in range(sizes.num_layers)]
        self.tokens, self.table = host_mapped(tokens, self.device), table.to(self.device)
        self.num_blocks = num_blocks

    def _enter_groups(self, catalog: Catalog, num_prompt: int) -> None:
        width, rules = self.shape.width, self.rules
        catalogs = RowCatalogs(self.device)
        catalogs.apply(CatalogChanges(new={catalog.digest: bytes(catalog.data)}))
        runner: Any = self._runner()
        self.rows, self.groups = Rows(runner), dict[str, GroupRows]()
        self.selector = Selector(runner, self.groups, self.rows, catalogs, self.num_slots)
        if self.device.type == "cuda":
            self.use_graphs(SelectionGraphCapture([]))
        request: Any = SimpleNamespace(prompt_token_ids=[0] * num_prompt, prompt_embeds=None)
        first_tokens = np.unique(catalog.tokens[1 : int(catalog.first_child[1])])
        steps = {}
        for number, slots in enumerate(self._in_batch[:, self.shape.num_ordinary :]):
            name, scores = str(number), -20 - SPREAD * torch.rand(1, width, generator=self._random)
            begun = first_tokens[np.arange(width) % len(first_tokens), None]
            states = self.selector.row_beams.begin(rules, Resumed(begun, scores[0].numpy()))
            beams = SearchBeams(scores.to(self.device), states=states)
            tokens = torch.zeros(width, dtype=torch.int64, device=self.device)
            self.groups[name] = GroupRows(request, rules, [str(slot) for slot in slots], beams, tokens, slots)
            steps[name] = GroupStep(SearchPhase(), selects=True, decodes=True)
        self.context = RunnerStepContext(steps, decided_at=None)
        self._beams = {name: group.beams for name, group in self.groups.items()}

    def use_graphs(self, capture: SelectionGraphCapture) -> None:
        """Take steps by graphs that are made so."""
        graphs = SelectionGraphs(self.rows, self.logits.dtype, capture, self.logits.numel())
        self.selector.use(graphs)

    def _runner(self) -> SimpleNamespace:
        """vLLM's, as far as rows and their selection know it."""
        states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=self.tokens),
            total_len=SimpleNamespace(gpu=torch.zeros(self.num_slots, dtype=torch.int32, device=self.device)),
            last_sampled_tokens=torch.zeros(self.num_slots, 1, dtype=torch.int64, device=self.device),
            req_id_to_index={str(slot): slot for slot in range(self.num_slots)},
        )
        groups = [SimpleNamespace(kv_cache_spec=None)]
        return SimpleNamespace(
            device=self.device,
            model_config=None,
            max_num_reqs=self.num_slots,
            sampler=self.sampler,
            req_states=states,
            block_tables=SimpleNamespace(block_tables=[SimpleNamespace(gpu=self.table)], block_sizes=[BLOCK_SIZE]),
            kv_cache_config=SimpleNamespace(kv_cache_groups=groups, num_blocks=self.num_blocks),
            kv_caches=self.caches,
            attn_groups=[[]],
            speculator=None,
        )

    @property
    def state(self) -> list[torch.Tensor]:
        """All that a step changes, besides what groups carry."""
        return [self.tokens, self.table, self.sampler.penalties_state.output_bin_counts, *self.caches]

    def snapshot(self) -> list[torch.Tensor]:
        """Copies of it, made by kernels: mapped memory is none that a device copies as its own."""
        return [part + 0 for part in self.state]

    def restore(self) -> None:
        """As it was before any step."""
        for part, initial in zip(self.state, self._initial, strict=True):
            torch.add(initial, 0, out=part)
        self.restore_groups()

    def restore_groups(self) -> None:
        """What they carry alone."""
        for name, group in self.groups.items():
            group.beams = self._beams[name]

    def batch(self) -> BatchRows:
        """All rows; each has one token in it."""
        slots, count = self._in_batch.ravel(), self._in_batch.size
        index = torch.arange(count, device=self.device)
        num_tokens = self.num_tokens.repeat(self._in_batch.shape[1])
        batch: Any = SimpleNamespace(
            idx_mapping_np=slots,
            num_reqs=count,
            seq_lens_cpu_upper_bound=torch.from_numpy(num_tokens),
            cu_num_logits_np=np.arange(count + 1),
            logits_indices=index,
            positions=index,
            input_ids=index.int(),
        )
        return BatchRows(batch, self.num_slots)

    def select(self) -> tuple[torch.Tensor, Any]:
        """Take a step. Returns it, packed, and its layout."""
        sampled = self.selector.begin_step(len(self.logits), 1)
        plan = self.selector.plan(self.context, self.batch().batch)
        (selected,) = self.selector.select(self.context, plan, self.logits, sampled)
        return selected.packed, selected.layout

    def reorder(self, parents: list[np.ndarray]) -> None:
        """Let rows continue those of their group, by group."""
        slots = np.array([group.slots for group in self.groups.values()])
        chosen = torch.from_numpy(np.array(parents)).long().to(self.device)
        rows = kv_rows_of_groups([slots], [[len(group.prompt) for group in self.groups.values()]])
        moved = KVFork.of(rows, self.num_tokens.repeat(slots.shape[1]), [chosen], self.device)
        self.rows.fork(moved, self.rules.is_controlled)

    def histories(self) -> Iterator[torch.Tensor]:
        """What rows hold, as far as anybody reads it: on the host."""
        table = self.table.cpu()
        for group, length in zip(self.groups.values(), self.num_tokens.tolist(), strict=True):
            slots, full = torch.from_numpy(group.slots), length // BLOCK_SIZE
            yield self.tokens[slots.to(self.device), :length].cpu()
            yield table[slots, :full]
            yield self.sampler.penalties_state.output_bin_counts[slots.to(self.device)].cpu()
            for cache in self.caches:
                yield cache[table[slots, full].long().to(self.device), :, : length % BLOCK_SIZE].cpu()

    def on_device_alone(self) -> Callable[[], torch.Tensor]:
        """A step, its packing and its reorder, as a graph holds them: all uploads are done before."""
        index = torch.from_numpy(np.array([self.batch().places(group.slots) for group in self.groups.values()]))
        logits = self.logits[index.to(self.device)]
        beams, slots = (
            SearchBeams.join([*self._beams.values()]),
            np.array([group.slots for group in self.groups.values()]),
        )
        first, host = (
            np.repeat(np.arange(0, slots.size, slots.shape[1]), slots.shape[1]),
            self.num_tokens.repeat(slots.shape[1]),
        )
        common = np.full(slots.size, len(next(iter(self.groups.values())).prompt))
        rows = torch.from_numpy(np.stack([slots.ravel(), first, common, host])).to(self.device)
        if self.rules.items is not None:
            beams = beams._replace(length=1)
        self.static_logits = logits
        take = select_by_kernels(self.rules, KernelStepSizes.of(beams, logits.shape[-1]))
        which = torch.arange(slots.size, device=self.device)
        of_rows = KernelLogits.of(logits.flatten(0, 1), which, self.rules.stops)
        sampled = torch.zeros(slots.size, 1, dtype=torch.int64, device=self.device)

        def run() -> torch.Tensor:
            if take is not None:
                step, words, _ = take(of_rows, beams, which, sampled)
            else:
                inputs = SearchInputs(select_next=slots_kernel.launch_select_next)
                step, words, _ = take_packed_search_step(self.rules, logits, beams, inputs)
            fork_kv(KVFork(rows, step.parents.flatten(), host), self.tokens, self.rows.kv)
            return words

        return run
