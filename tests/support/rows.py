"""What a worker holds of beam groups, against what the scheduler believes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tests.support.engine import Engine


class Row(NamedTuple):
    tokens: list[int]  # generated ones
    blocks: list[list[int]]  # by KV cache group


def rows_of(runner: Any) -> dict[str, list[Row]]:
    """The rows of each group that has all of them in a model runner."""
    known = runner.req_states.req_id_to_index
    return rows_of_groups(runner, [name for name, group in runner.groups.items() if known.keys() >= {*group.row_ids}])


def rows_of_groups(runner: Any, group_ids: Iterable[str]) -> dict[str, list[Row]]:
    """The rows of groups that have all of them in a model runner."""
    states, num_blocks = runner.req_states, runner.block_tables.num_blocks.np
    tokens, ends = (of_slots.gpu.cpu().numpy() for of_slots in (states.all_token_ids, states.total_len))
    starts, tables = states.prompt_len.np, [table.gpu.cpu().numpy() for table in runner.block_tables.block_tables]

    def row(slot: int) -> Row:
        blocks = [table[slot, :count].tolist() for table, count in zip(tables, num_blocks[:, slot], strict=True)]
        return Row(tokens[slot, starts[slot] : ends[slot]].tolist(), blocks)

    return {
        group_id: [row(states.req_id_to_index[row_id]) for row_id in runner.groups[group_id].row_ids]
        for group_id in group_ids
    }


class WatchedRows:
    """Looks at all rows of decoding groups after every step, and compares when its result arrives.

    Under async scheduling that is a step later, and the scheduler has made room for the next token by then.
    """

    def __init__(self, engine: Engine) -> None:
        self.num_compared = 0
        self.most_pending = 0
        self.waiting = set[int]()  # rows of groups that had them, but were not in a step
        self._engine = engine
        self._seen: deque[dict[str, list[Row]]] = deque()
        engine.runner.sample_tokens, engine.scheduler.update_from_output = self._sample_tokens, self._update_from_output

    def restart(self) -> None:
        """Count from now on."""
        self.num_compared = self.most_pending = 0
        self.waiting.clear()

    def _sample_tokens(self, *args: Any) -> Any:
        runner = self._engine.runner
        output = type(runner).sample_tokens(runner, *args)  # whose class changes, see `compat.at_rest`
        waiting = runner.groups.keys() - runner.step.steps.keys()
        self.waiting.update(len(runner.groups[group_id].row_ids) for group_id in waiting)
        self._seen.append(rows_of_groups(runner, runner.step.decoding))
        return output

    def _update_from_output(self, scheduler_output: Any, *args: Any) -> Any:
        seen = self._seen.popleft() if scheduler_output.total_num_scheduled_tokens else {}
        scheduler = self._engine.scheduler
        pending = [group.num_pending for group in scheduler.groups.values()]
        self.most_pending = max([self.most_pending, *pending])
        outputs = type(scheduler).update_from_output(scheduler, scheduler_output, *args)
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
