"""Between forward and sampling: every group's next beams, groups with equal rules together.

Called by `runner` where vLLM would sample. Nothing waits for the device but stop strings, which are looked for in
text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_trie.search.constraints.stops import Completes
from vllm_trie.search.rules import Means, SelectRules
from vllm_trie.search.slots import select_next
from vllm_trie.search.step import take_step
from vllm_trie.search.step_result import packed
from vllm_trie.search.stop_strings import CONTEXT
from vllm_trie.worker import kernels
from vllm_trie.worker.catalogs import DeviceCatalogs
from vllm_trie.worker.group_rows import BatchRows, GroupRows
from vllm_trie.worker.kernels import slots as slots_kernel
from vllm_trie.worker.row_beams import RowBeams
from vllm_trie.worker.row_params import stop_strings_of
from vllm_trie.worker.row_reorder import Reorders
from vllm_trie.worker.rows import Rows
from vllm_trie.worker.step_context import PackedStep, StepContext

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


class Selector:
    """Takes the steps of the search for the rows of one runner.

    Args:
        runner: vLLM's, whose sampler processes logits.
        groups: Its groups; their scores and newest tokens are updated.
        rows: Its rows.
        catalogs: On its device.
    """

    def __init__(
        self, runner: GPUModelRunner, groups: dict[str, GroupRows], rows: Rows, catalogs: DeviceCatalogs
    ) -> None:
        self._groups = groups
        self._sampler = runner.sampler
        self.rows = rows
        self.row_beams = RowBeams(rows, catalogs)
        self._stop_strings = stop_strings_of(runner.model_config)

    def begin(self, context: StepContext) -> None:
        """Begin the states of rows that are new, once they have tokens that the host knows."""
        for group_id in context.entered:
            if group_id not in context.new_tokens_unknown:
                group, step = self._groups[group_id], context.steps[group_id]
                group.beams = group.beams._replace(states=self.row_beams.begin(step.rules, step.resumed))

    def select(
        self, context: StepContext, rows: BatchRows, logits: torch.Tensor, sampled: torch.Tensor
    ) -> list[PackedStep]:
        """Take one step of every group that searches and does not speculate.

        Args:
            context: The step's.
            rows: Where its rows are.
            logits: [N, V], unprocessed.
            sampled: [R, ...] int64, receives the newest token of every row of a group.
        """
        alike = defaultdict(list)
        for group_id, step_of_group in context.plain.items():
            alike[step_of_group.rules, step_of_group.decodes, group_id in context.masks].append(group_id)
        selected, reorders = [], Reorders()
        into_slots = slots_kernel.select_next if kernels.run_on(logits.device) else select_next
        for (rules, decodes, has_masks), group_ids in alike.items():
            groups = [self._groups[group_id] for group_id in group_ids]
            slots = np.array([group.slots for group in groups])
            places = rows.places(slots)
            num_tokens = rows.num_tokens(places[:, 0])
            draws = [draw for group_id in group_ids if (draw := context.steps[group_id].draw) is not None]
            completes = self.completes(rules, groups, num_tokens)
            masks = [context.masks[group_id] for group_id in group_ids] if has_masks else []
            beams = self.row_beams.before_step(rules, groups, num_tokens, masks, logits.shape[-1])
            of_rows = self._logits(rules, rows, logits, slots, places)
            step = take_step(rules, of_rows, beams, Means(draws, completes, into_slots))
            selected.append(PackedStep(group_ids, *packed(step)))
            tokens = step.tokens.long()
            after = beams.after(step)
            for place, (group, own) in enumerate(zip(groups, tokens, strict=True)):
                group.tokens, group.batch, group.place = own, after, place
            at = self.rows.upload(places)
            sampled[at, 0] = tokens[:, : places.shape[1]]
            if decodes and places.shape[1] > 1:
                reorders.add(slots, step.parents, [len(group.prompt) for group in groups], num_tokens)
        self.rows.reorder(reorders, any(rules.is_controlled for rules, *_ in alike))
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
            of_rows = logits[self.rows.upload(flat)]
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
            depths: [N], how many of the N just before it come on top of that history; none if left out.
        """
        depths = np.zeros_like(slots) if depths is None else depths
        batch = rows.batch
        at, in_slots, local = map(self.rows.upload, (index, slots, depths))
        newest = batch.logits_indices[at]
        positions, tokens = batch.positions[newest], batch.input_ids[newest]
        return self._sampler.apply_sampling_params(
            logits[at], in_slots, in_slots, slots, positions, tokens, local.int(), num_tokens, skip_top_k_top_p=True
        )

    def completes(
        self,
        rules: SelectRules,
        groups: Sequence[GroupRows],
        num_tokens: np.ndarray,
        path: Callable[[int], tuple[int, list[int]]] | None = None,
    ) -> Completes | None:
        """What finds candidates that complete a stop string; None if none can.

        Args:
            rules: Theirs.
            groups: G of them.
            num_tokens: [G], of each row of a group before this step.
            path: Of a beam: its row, and its further tokens; by default beams are rows, and have none.
        """
        stops = rules.stops
        if not stops.strings or stops.are_barred:
            return None
        strings = self._stop_strings(stops.strings, stops.skips_special_tokens)
        tokens, at, starts = self.rows.generated(groups, num_tokens)

        def judge(parents: np.ndarray, candidates: np.ndarray, histories: np.ndarray | None) -> np.ndarray:
            assert histories is not None
            result = strings.may_complete(candidates)
            for group, rank in zip(*result.nonzero(), strict=True):
                prompt, beam = groups[group].prompt, int(parents[group, rank])
                row, further = (beam, []) if path is None else path(beam)
                generated = histories[at[group, row], starts[group] :][: num_tokens[group] - len(prompt)].tolist()
                token = int(candidates[group, rank])
                result[group, rank] = strings.is_completed_by(token, prompt[-CONTEXT:], generated + further)
            return result

        return Completes(judge, tokens)
