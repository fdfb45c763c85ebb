"""Selects every group's next beams between the forward pass and sampling, groups with equal rules together.

Called by `runner` where vLLM would sample. Nothing waits for the device except stop strings, which are looked for in
text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.stops import StopStringConstraint
from vllm_trie.search.devices import uploaded_once_for_search
from vllm_trie.search.rules import SearchInputs, SearchRules
from vllm_trie.search.step import is_light_search_step, take_packed_search_step
from vllm_trie.search.step_result import PackedSearchStep
from vllm_trie.search.stop_strings import CONTEXT, SearchTextEnd
from vllm_trie.worker import launches
from vllm_trie.worker.kv.kv_moves import KVFork
from vllm_trie.worker.rows.catalogs import RowCatalogs
from vllm_trie.worker.rows.row_beams import RowBeams
from vllm_trie.worker.rows.row_params import stop_strings_of_rows
from vllm_trie.worker.rows.rows import BatchRows, GroupRows, Rows, beams_of_rows
from vllm_trie.worker.select.cohort import (
    CohortLogits,
    GroupInStep,
    MovingRows,
    SelectionBatchPlan,
    SelectionCohort,
    put_newest_selected,
    selection_index_of,
)
from vllm_trie.worker.select.narrow import SelectionLogits
from vllm_trie.worker.step_context import RunnerStepContext, SelectedCohort

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from vllm_trie.worker.select.amateur import SelectionAmateurLogits
    from vllm_trie.worker.select.selection_graphs import SelectionGraphs

Group = TypeVar("Group")


@lru_cache(maxsize=64)
def no_selection_depths(count: int, device: torch.device) -> torch.Tensor:
    """[count] int32 zeros. Read-only."""
    return torch.zeros(count, dtype=torch.int32, device=device)


class Selector:
    """Takes the search steps of one runner's rows, by `graphs` if there are any.

    Args:
        runner: vLLM's, whose sampler processes logits.
        groups: The runner's; their scores and newest tokens are updated.
        rows: The runner's.
        catalogs: On its device.
        most_together: Rows of several groups that may share a step that needs much memory.
    """

    def __init__(
        self,
        runner: GPUModelRunner,
        groups: dict[str, GroupRows],
        rows: Rows,
        catalogs: RowCatalogs,
        most_together: int,
    ) -> None:
        self._groups = groups
        self._sampler = runner.sampler
        self._most_together = most_together
        self._catalogs = catalogs
        self._max_num_reqs = runner.max_num_reqs
        self._plan: SelectionBatchPlan | None = None
        self.rows = rows
        self.row_beams = RowBeams(rows, catalogs)
        self.graphs: SelectionGraphs | None = None
        # Begins a step: returns [rows of a batch, tokens of each] int64, for the newest tokens.
        self.begin_step: Callable[[int, int], torch.Tensor] = partial(
            torch.zeros, dtype=torch.int64, device=rows.device
        )
        self._stop_strings = stop_strings_of_rows(runner.model_config)

    def begin(self, context: RunnerStepContext) -> None:
        """Begins the states of new rows whose tokens the host knows."""
        for group_id in context.entered:
            if group_id not in context.new_tokens_unknown:
                group, step = self._groups[group_id], context.steps[group_id]
                group.beams = group.beams._replace(
                    states=self.row_beams.begin(group.rules, step.resumed, step.excludes)
                )

    def use(self, graphs: SelectionGraphs) -> None:
        """Takes steps by these graphs from now on."""
        self.graphs, self.begin_step = graphs, graphs.begin_step

    def forget(self) -> None:
        """Forgets the last batch: this one has no groups."""
        self._plan = None

    def plan(self, context: RunnerStepContext, batch: InputBatch) -> SelectionBatchPlan:
        """What is known of a batch before there are logits; usually unchanged from the last batch."""
        groups, masks, plain = self._groups, context.masks, context.steps.keys() - context.forests.keys()
        in_step = {
            id_: GroupInStep(
                *(groups[id_], groups[id_].rules, step.decodes, step.selects, step.selects and id_ in plain),
                *(id_ in masks, id_ in context.narrow),
            )
            for id_, step in context.steps.items()
        }
        if self._plan is None or not self._plan.fits(in_step, batch):
            self._plan = SelectionBatchPlan(in_step, BatchRows(batch, self._max_num_reqs), self.parts, self.rows.device)
        self._plan.rows.batch = batch
        return self._plan

    def levels(self, plan: SelectionBatchPlan) -> list[torch.Tensor]:
        """For each cohort that narrows, [K] int64 on the device: the tokens whose logits it needs."""
        return [self._catalogs.trie_of(cohort.rules).level(plan.length(cohort)) for cohort in plan.narrow]

    def select(
        self,
        context: RunnerStepContext,
        plan: SelectionBatchPlan,
        logits: torch.Tensor | SelectionLogits,
        sampled: torch.Tensor,
        amateur: SelectionAmateurLogits | None = None,
    ) -> list[SelectedCohort]:
        """Takes one step of every group that searches and does not speculate.

        Args:
            context: The step's.
            plan: The batch's.
            logits: [N, V], unprocessed; in parts, if the plan narrows some.
            sampled: [R, ...] int64, receives the newest token of every row of a group.
            amateur: The draft model's, for rows of groups that contrast it, if there are any.
        """
        selected, parents, moving, has_replayed = list[SelectedCohort](), [], list[SelectionCohort](), False
        logits, of_levels = logits if isinstance(logits, SelectionLogits) else (logits, [])
        narrow, graphs = iter(of_levels), self.graphs if launches.worker_runs_kernels_on(logits.device) else None
        for cohort in plan.cohorts:
            rules, groups = cohort.rules, cohort.groups
            level, own = next(narrow) if cohort.narrows else (None, logits)
            own = self._controlled(cohort, plan.rows, own) if rules.is_controlled else own
            replayed = None if graphs is None else graphs.take(plan, CohortLogits(cohort, own, level), sampled)
            if replayed is not None:
                selected.append(replayed)
                has_replayed = True
                continue
            num_tokens = plan.rows.num_tokens(cohort.places[:, 0])
            keys = [key for group_id in cohort.group_ids if (key := context.steps[group_id].sampling_key) is not None]
            completes = self.completes(rules, groups, num_tokens) if rules.stops.may_complete else None
            masks = [context.masks[group_id] for group_id in cohort.group_ids] if cohort.has_masks else []
            if rules.constraints:
                of_amateur = None if amateur is None or not rules.contrasts else amateur.of(cohort.places)
                beams = self.row_beams.before_step(rules, groups, num_tokens, masks, logits.shape[-1], of_amateur)
                beams = beams._replace(length=cohort.common_length(num_tokens))
            else:
                beams = beams_of_rows(groups)
            taken = self._take(cohort, beams, own, SearchInputs(keys, completes, level=level), sampled)
            selected.append(SelectedCohort(cohort.group_ids, taken.words, taken.layout))
            after = beams.after(taken.going) if beams.states else taken.going.beams
            for place, (group, own) in enumerate(zip(groups, taken.going.tokens.long(), strict=True)):
                group.tokens, group.batch, group.place = own, after, place
            if cohort.moves:
                parents.append(taken.going.parents)
                moving.append(cohort)
        if parents:
            rows = MovingRows.of(moving) if has_replayed else plan.moving
            moved = KVFork.of(rows.rows, plan.rows.num_tokens(rows.places), parents, self.rows.device)
            self.rows.fork(moved, plan.is_controlled)
        return selected

    def parts(self, rules: SearchRules, groups: list[Group]) -> list[list[Group]]:
        """Splits groups with equal rules by step: as many beams as there are rows, or few where a step needs memory."""
        num_rows = self._max_num_reqs if is_light_search_step(rules) else self._most_together
        most = max(num_rows // rules.width, 1)  # prompts of searches of one token may lead to more beams in all
        return [groups[at : at + most] for at in range(0, len(groups), most)]

    def _take(
        self,
        cohort: SelectionCohort,
        beams: SearchBeams,
        values: torch.Tensor,
        inputs: SearchInputs,
        sampled: torch.Tensor,
    ) -> PackedSearchStep:
        """The step of groups with equal rules, from logits `values`; `sampled` [R, ...] receives newest tokens."""
        rules, which = cohort.rules, slice(None) if cohort.rules.is_controlled else cohort.which
        if not launches.worker_runs_kernels_on(values.device):
            of_rows = values[which].view(*cohort.places.shape, -1)
            step = take_packed_search_step(rules, of_rows, beams, inputs, cohort.layout(values.shape[1]))
            put_newest_selected(step.going, cohort.on_device[1], sampled)
            return step
        kernels, places = launches.worker_module_for_gpus("worker.select.by_kernels"), cohort.on_device[1]
        logits_of, take = kernels.planned_selection(cohort, values, beams, inputs.level)
        take_rows = take or kernels.SelectionStepByTorch(rules, inputs, which, cohort.layout(values.shape[1]))
        return take_rows(logits_of, beams, places, sampled)

    def _controlled(self, cohort: SelectionCohort, rows: BatchRows, logits: torch.Tensor) -> torch.Tensor:
        """[G * r, V], processed logits of the rows of a cohort."""
        num_tokens = rows.num_tokens(cohort.places).ravel()
        return self.processed(rows, logits[cohort.which], cohort.index.ravel(), cohort.slots.ravel(), num_tokens)

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
            rows: The batch's.
            logits: [N, V], unprocessed.
            index: [N], their indices among the batch's.
            slots: [N], whose options and history (the tokens of the slot's request) apply.
            num_tokens: [N], how many tokens precede what the logits are for.
            depths: [N], how many of the N rows just before it extend that history; None: none.
        """
        batch, device = rows.batch, logits.device
        in_slots = uploaded_once_for_search(slots, device)
        local = no_selection_depths(len(slots), device) if depths is None else self.rows.upload(depths, np.int32)
        of_batch = batch.logits_indices, batch.positions, batch.input_ids
        if launches.worker_runs_kernels_on(device):
            take_newest = launches.worker_module_for_gpus("worker.kernels.controls").launch_take_newest
            positions, tokens = take_newest(uploaded_once_for_search(index, device), *of_batch)
        else:
            newest = batch.logits_indices[selection_index_of(index, device)]
            positions, tokens = batch.positions[newest], batch.input_ids[newest]
        return self._sampler.apply_sampling_params(
            logits, in_slots, in_slots, slots, positions, tokens, local, num_tokens, skip_top_k_top_p=True
        )

    def completes(
        self,
        rules: SearchRules,
        groups: Sequence[GroupRows],
        num_tokens: np.ndarray,
        path: Callable[[int], tuple[int, list[int]]] | None = None,
    ) -> StopStringConstraint:
        """Finds candidates that complete a stop string.

        Args:
            rules: The rules of all groups, which allow stop strings.
            groups: G of them.
            num_tokens: [G], of each row of a group before this step.
            path: From a beam to its row, and its further tokens; by default beams are rows, and have none.
        """
        stops = rules.stops
        strings = self._stop_strings(stops.strings, stops.skips_special_tokens, stops.spaces_special_tokens)
        ends = dict[tuple[int, int], SearchTextEnd]()  # by group and beam: only where a candidate may complete a string
        tokens, at, starts = self.rows.generated(groups, num_tokens)
        num_generated = num_tokens - np.array([len(group.prompt) for group in groups])

        def judge(parents: np.ndarray, candidates: np.ndarray, histories: np.ndarray) -> np.ndarray:
            def end_of(group: int, beam: int) -> SearchTextEnd:
                if (group, beam) not in ends:
                    prompt = groups[group].request.prompt_token_ids or []
                    row, further = (beam, []) if path is None else path(beam)
                    generated = histories[at[group, row], starts[group] :][: num_generated[group]].tolist()
                    ends[group, beam] = strings.end_of(prompt[-CONTEXT:], generated + further)
                return ends[group, beam]

            return strings.completed(parents, candidates, end_of)

        return StopStringConstraint(judge, tokens)
