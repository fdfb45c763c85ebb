"""What the device's rows hold after each step, against what the scheduler believes once it hears of that step."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import pytest

from tests.conftest import Engine


class Row(NamedTuple):
    tokens: list[int]  # generated ones
    blocks: list[list[int]]  # by KV cache group


class WatchedRows:
    """Looks at all rows of decoding groups after every step, and compares when its result arrives.

    Under async scheduling that is a step later, and the scheduler has made room for the next token by then.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_compared = 0
        self.most_pending = 0
        self._engine = engine
        self._seen: deque[dict[str, list[Row]]] = deque()
        self._sample, self._update = engine.runner.sample_tokens, engine.scheduler.update_from_output
        monkeypatch.setattr(engine.runner, "sample_tokens", self._sample_tokens)
        monkeypatch.setattr(engine.scheduler, "update_from_output", self._update_from_output)

    def _sample_tokens(self, *args: Any) -> Any:
        output = self._sample(*args)
        slots = self._engine.runner.beam_slots
        self._seen.append({group_id: self._rows(group_id) for group_id, step in slots.steps.items() if step.decodes})
        return output

    def _rows(self, group_id: str) -> list[Row]:
        runner = self._engine.runner
        states, tables = runner.req_states, runner.block_tables
        group, rows = runner.beam_slots.groups[group_id], []
        for row_id in group.row_ids:
            slot = states.req_id_to_index[row_id]
            start = len(group.request.prompt_token_ids)
            tokens = states.all_token_ids.gpu[slot, start : states.total_len.gpu[slot]].tolist()
            counts = tables.num_blocks.np[:, slot].tolist()
            rows.append(
                Row(tokens, [t.gpu[slot, :n].tolist() for t, n in zip(tables.block_tables, counts, strict=True)])
            )
        return rows

    def _update_from_output(self, scheduler_output: Any, *args: Any) -> Any:
        seen = self._seen.popleft() if scheduler_output.total_num_scheduled_tokens else {}
        scheduler = self._engine.scheduler
        pending = [group.num_pending for group in scheduler.groups.values()]
        self.most_pending = max([self.most_pending, *pending])
        outputs = self._update(scheduler_output, *args)
        for group_id, rows in seen.items():
            group = scheduler.groups.get(group_id)
            tries = scheduler.kv_cache_manager._groups[group_id].tries if group is not None else []
            if group is None or not tries or len(rows[0].tokens) != group.length:
                continue  # over, or preempted since
            for number, row in enumerate(rows):
                assert row.tokens == group.history(number), (group_id, number)
                for trie, blocks in zip(tries, row.blocks, strict=True):
                    held = blocks[trie.num_skipped :]
                    assert held == trie.row_blocks(number)[: len(held)], (group_id, number)
                self.num_compared += 1
        return outputs
