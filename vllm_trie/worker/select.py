"""Between forward and sampling: every group's next beams, groups with equal rules together.

Called by `runner` where vLLM would sample. Nothing waits for the device but stop strings, which are looked for in
text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_trie.search.rank import Candidates, Completes
from vllm_trie.search.rules import Means, SelectRules
from vllm_trie.search.slots import select_next
from vllm_trie.search.step import take_step
from vllm_trie.search.step_result import packed
from vllm_trie.search.stop_strings import CONTEXT
from vllm_trie.worker import kernels
from vllm_trie.worker.histories import Histories
from vllm_trie.worker.row_beams import RowBeams
from vllm_trie.worker.row_options import stop_strings_of
from vllm_trie.worker.row_reorder import Reorders
from vllm_trie.worker.rows import BatchRows, GroupRows
from vllm_trie.worker.step_context import Selected, StepContext


class Selector:
    """Takes the steps of the search for the rows of one runner.

    Args:
        runner: vLLM's, which holds the rows' tokens and blocks.
        groups: Its groups; their scores and newest tokens are updated.
        sampler: vLLM's, which processes logits, and holds what penalties count.
        row_beams: What its rows carry.
        histories: Of its rows.
    """

    def __init__(
        self,
        runner: GPUModelRunner,
        groups: dict[str, GroupRows],
        sampler: Sampler,
        row_beams: RowBeams,
        histories: Histories,
    ) -> None:
        self._runner = runner
        self._groups = groups
        self._sampler = sampler
        self.row_beams = row_beams
        self.histories = histories
        self._stop_strings = stop_strings_of(runner.model_config)

    def select(
        self, context: StepContext, rows: BatchRows, logits: torch.Tensor, sampled: torch.Tensor
    ) -> list[Selected]:
        """Take one step of every group that searches and does not speculate.

        Args:
            context: The step's.
            rows: Where its rows are.
            logits: [N, V], unprocessed.
            sampled: [R, ...] int64, receives the newest token of every row of a group.
        """
        alike = defaultdict(list)
        for group_id, asked in context.steps.items():
            if asked.selects and group_id not in context.forests:
                alike[asked.rules, asked.decodes, group_id in context.masks].append(group_id)
        selected, reorders = [], Reorders()
        into_slots = kernels.select_next if kernels.run_on(logits.device) else select_next
        for (rules, decodes, has_masks), group_ids in alike.items():
            groups = [self._groups[group_id] for group_id in group_ids]
            slots = np.array([group.slots for group in groups])
            places = rows.places(slots)
            num_tokens = rows.num_tokens(places[:, 0])
            draws = [draw for group_id in group_ids if (draw := context.steps[group_id].draw) is not None]
            completes = self.completes(rules, lambda group, row: self.history(groups[group], row))  # noqa: B023
            masks = [context.masks[group_id] for group_id in group_ids] if has_masks else []
            beams = self.row_beams.before_step(rules, groups, num_tokens, masks, logits.shape[-1])
            of_rows = self._logits(rules, rows, logits, slots, places)
            step = take_step(rules, of_rows, beams, Means(draws, completes, into_slots))
            selected.append(Selected(group_ids, *packed(step)))
            tokens = step.tokens.long()
            for group, of_tokens, of_beams in zip(groups, tokens, beams.after(step).split(), strict=True):
                group.tokens, group.beams = of_tokens, of_beams
            at = async_tensor_h2d(places, device=logits.device, dtype=torch.int64)
            sampled[at, 0] = tokens[:, : places.shape[1]]
            if decodes and places.shape[1] > 1:
                reorders.add(slots, step.parents, [len(group.prompt) for group in groups], num_tokens)
        if reorders.rows:
            moved = self.histories.reorder(reorders)
            if any(rules.is_controlled for rules, *_ in alike):
                self._reorder_controls(moved.slots, moved.sources)
        return selected

    def _logits(
        self, rules: SelectRules, rows: BatchRows, logits: torch.Tensor, slots: np.ndarray, places: np.ndarray
    ) -> torch.Tensor:
        """[G, r, V] of rows in the batch, processed if the rules want it."""
        index = rows.first_logits(places)
        flat = index.ravel()
        if rules.is_controlled:
            of_rows = self.processed(rows, logits, flat, slots.ravel(), rows.num_tokens(places).ravel())
        elif flat.tolist() == [*range(flat[0], flat[0] + len(flat))]:
            of_rows = logits[flat[0] : flat[0] + len(flat)]
        else:
            of_rows = logits[async_tensor_h2d(flat, device=logits.device, dtype=torch.int64)]
        return of_rows.view(*index.shape, -1)

    def processed(
        self,
        rows: BatchRows,
        logits: torch.Tensor,
        index: np.ndarray,
        slots: np.ndarray,
        num_tokens: np.ndarray,
        depths: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Logits after the penalties, biases, bans and custom processors of requests, [N, V] float32.

        Args:
            rows: Of the batch.
            logits: Of the batch, unprocessed.
            index: [N], which of them.
            slots: [N], whose options, and whose history: the tokens of the slot's request.
            num_tokens: [N], how many tokens come before what the logits are of.
            depths: [N], how many of the tokens just before in the batch come on top of that history; none if left out.
        """
        depths = np.zeros_like(slots) if depths is None else depths
        batch = rows.batch
        at, in_slots, local = (
            async_tensor_h2d(values, device=logits.device, dtype=torch.int64) for values in (index, slots, depths)
        )
        newest = batch.logits_indices[at]
        positions, tokens = batch.positions[newest], batch.input_ids[newest]
        return self._sampler.apply_sampling_params(
            logits[at], in_slots, in_slots, slots, positions, tokens, local.int(), num_tokens, skip_top_k_top_p=True
        )

    def completes(
        self, rules: SelectRules, history: Callable[[int, int], tuple[list[int], list[int]]]
    ) -> Completes | None:
        """Which candidates [G, K] on the host complete a stop string; None if none can.

        Args:
            rules: Theirs.
            history: Of a group and a row: the last few tokens of the prompt, and what the row has generated.
        """
        stops = rules.stops
        if not stops.strings or stops.are_barred:
            return None
        strings = self._stop_strings(stops.strings, stops.skips_special_tokens)

        def completed(candidates: Candidates) -> np.ndarray:
            result = strings.may_complete(candidates.tokens)
            for group, rank in zip(*result.nonzero(), strict=True):
                prompt, generated = history(int(group), int(candidates.parents[group, rank]))
                result[group, rank] = strings.is_completed_by(int(candidates.tokens[group, rank]), prompt, generated)
            return result

        return completed

    def history(self, group: GroupRows, row: int) -> tuple[list[int], list[int]]:
        """The last few tokens of the prompt, and what a row has generated before this step. Waits for the device."""
        states, slot, prompt = self._runner.req_states, group.slots[row], group.prompt
        generated = states.all_token_ids.gpu[slot, len(prompt) : int(states.total_len.gpu[slot])]
        return prompt[-CONTEXT:], generated.tolist()

    def adopt(
        self, slots: np.ndarray, sources: np.ndarray, num_tokens: int, tables: list[np.ndarray], is_controlled: bool
    ) -> None:
        """Let rows continue the histories of others, with these blocks.

        Args:
            slots, sources: [b] slots of rows.
            num_tokens: Of the histories.
            tables: By KV cache group: [b, columns] the blocks that each row has then.
            is_controlled: Whether they also take over what the processors of their logits know.
        """
        states, block_tables = self._runner.req_states, self._runner.block_tables
        to, source = (
            async_tensor_h2d(of_rows, device=self._runner.device, dtype=torch.int64) for of_rows in (slots, sources)
        )
        states.all_token_ids.gpu[to, :num_tokens] = states.all_token_ids.gpu[source, :num_tokens]
        for number, table in enumerate(tables):
            blocks = async_tensor_h2d(table, device=self._runner.device, dtype=torch.int32)
            block_tables.block_tables[number].gpu[to, : table.shape[1]] = blocks
            block_tables.num_blocks.np[number, slots] = table.shape[1]
        if is_controlled:
            self._reorder_controls(to, source)

    def _reorder_controls(self, slots: torch.Tensor, sources: torch.Tensor) -> None:
        """Let rows take over what the processors of their logits know of those that they continue.

        Args:
            slots, sources: [R] int64.
        """
        counts = self._sampler.penalties_state.output_bin_counts
        counts[slots] = counts[sources]
        for processor in self._sampler.logits_processors:
            if (reorder := getattr(processor, "reorder_rows", None)) is not None:  # ours to offer, not vLLM's
                reorder(slots, sources)
