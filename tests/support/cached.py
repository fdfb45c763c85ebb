"""What the prefix cache says that its blocks hold, against what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_block_hash, hash_block_tokens

from tests.support.engine import Engine

TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}  # keys and values are of order 1
ANY_TOKEN = 7


class Entry(NamedTuple):
    """A block as it enters the prefix cache."""

    group: int  # KV cache group
    block_id: int
    history: tuple[int, ...]  # all tokens up to its last one


class WatchedCache:
    """Notes what enters the prefix cache of an engine, and which tokens it stands for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pool = engine.scheduler.kv_cache_manager.block_pool
        self._entries = dict[tuple[int, int], Entry]()  # by group and block, the newest
        self._enter = self._pool.cache_full_blocks

    def __enter__(self) -> WatchedCache:
        assert self._engine.llm.llm_engine.reset_prefix_cache()
        self._pool.cache_full_blocks = self._cache_full_blocks
        return self

    def __exit__(self, *_: Any) -> None:
        del self._pool.cache_full_blocks
        assert self._engine.llm.llm_engine.reset_prefix_cache()

    def _cache_full_blocks(self, *, request: Any, blocks: list[Any], num_full_blocks: int, **rest: Any) -> None:
        had_hash = {block.block_id for block in blocks if block.block_hash is not None}
        self._enter(request=request, blocks=blocks, num_full_blocks=num_full_blocks, **rest)
        group, block_size = rest["kv_cache_group_id"], rest["block_size"]
        for number, block in enumerate(blocks[:num_full_blocks], 1):
            if block.block_hash is not None and block.block_id not in had_hash:
                history = tuple(request.all_token_ids[: number * block_size])
                self._entries[group, block.block_id] = Entry(group, block.block_id, history)

    def entries(self) -> list[Entry]:
        """What is in the cache now."""
        return [entry for entry in self._entries.values() if self._pool.blocks[entry.block_id].block_hash is not None]

    def check(self) -> int:
        """Raise AssertionError unless each block in the cache has the hash of the history that it stands for, and holds
        what this history leads to when it is computed anew. Returns how many there are.
        """
        found, compared = {entry: self._content(entry.group, entry.block_id) for entry in self.entries()}, set[Entry]()
        assert len(found) == sum(block.block_hash is not None for block in self._pool.blocks)
        for entry in found:
            block_hash = get_block_hash(self._pool.blocks[entry.block_id].block_hash)
            assert block_hash == self._hash(entry.history), f"block {entry.block_id} is hashed as another history's"
        histories = {entry.history for entry in found}
        for history in histories if self._engine.scheduler.has_mamba_layers else _longest(histories):
            true = self._computed_anew(history)
            for entry, content in found.items():
                if entry.history == history[: len(entry.history)] and (entry.group, len(entry.history)) in true:
                    compared.add(entry)
                    for layer, expected in true[entry.group, len(entry.history)].items():
                        is_true = torch.allclose(content[layer], expected, **TOLERANCE)
                        assert is_true, f"block {entry.block_id} is poisoned in {layer}: not {entry.history}"
        assert compared == found.keys()
        return len(found)

    def _computed_anew(self, history: tuple[int, ...]) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
        """By KV cache group and tokens up to its end: each full block of a history, computed as a prompt.

        Of recurrent states, that is the last one alone.
        """
        coordinator, held = self._engine.scheduler.kv_cache_manager.coordinator, list[tuple[list[Any], ...]]()
        with pytest.MonkeyPatch.context() as patch:
            free = coordinator.free
            patch.setattr(coordinator, "free", lambda id_: (held.append(coordinator.get_blocks(id_)), free(id_)))
            anew = SamplingParams(temperature=0, max_tokens=1, skip_reading_prefix_cache=True)
            self._engine.generate([[*history, ANY_TOKEN]], anew)
        (blocks,), size = held, self._pool.hash_block_size
        return {
            (group, number * size): self._content(group, block.block_id)
            for group, of_group in enumerate(blocks)
            for number, block in enumerate(of_group[: len(history) // size], 1)
            if not block.is_null
        }

    def _hash(self, history: tuple[int, ...]) -> Any:
        size, parent = self._pool.hash_block_size, None
        function = get_hash_fn_by_name(self._engine.core.vllm_config.cache_config.prefix_caching_hash_algo)
        for start in range(0, len(history), size):
            parent = hash_block_tokens(function, parent, history[start : start + size], None)
        return parent

    def _content(self, group: int, block_id: int) -> dict[str, torch.Tensor]:
        """By layer, those of a draft model among them."""
        layers = self._engine.core.vllm_config.compilation_config.static_forward_context
        names = self._engine.scheduler.kv_cache_config.kv_cache_groups[group].layer_names
        caches = {name: layers[name].kv_cache for name in names}
        return {
            f"{name}, part {number}": part[block_id].clone()
            for name, parts in caches.items()
            for number, part in enumerate(parts if isinstance(parts, list | tuple) else [parts])
        }


def _longest(histories: set[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Those that none of the others begins with."""
    previous: tuple[int, ...] = ()
    for history in sorted(histories, reverse=True):
        if previous[: len(history)] != history:
            yield history
            previous = history
