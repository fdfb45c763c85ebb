"""Speculation of the groups that were granted some: draft a forest, and lay it out as rows.

A forest is verified by multi-token rows of the batch. Beams have theirs; every other path gets a row that
lasts one step, with blocks that were lent for it. Next: `verify`, then `commit`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_trie.messages import Grant, GroupStep, SelectRules
from vllm_trie.search.forest import Forest, Layer, RowFork, affordable, grow
from vllm_trie.search.sampling import generator, joint
from vllm_trie.search.speculation import DraftRules, Drafts, drafted
from vllm_trie.search.warping import log_probabilities
from vllm_trie.worker.draft_model import DraftModel
from vllm_trie.worker.rank_check import RankCheck
from vllm_trie.worker.rows import BeamRows, GroupRows

NO_BLOCK = 0
NO_NODE = -1
GREEDY = SamplingParams(temperature=0.0)  # of rows whose samples nobody reads


@dataclass(slots=True)
class Speculation:
    """One group's forest in one step."""

    step: GroupStep
    grant: Grant
    rows: GroupRows
    index: np.ndarray  # [b] the beams' rows in the batch
    start: int  # position of the roots: as many tokens are computed
    block_size: int
    forest: Forest
    layer: Layer
    blocks: np.ndarray  # [rows, columns] int32 of every row of the forest, up to the last it may write
    pending: list[list[int]]  # of each beam the tokens that the draft model has not computed
    rng: np.random.Generator | None  # of what is drawn
    num_layers: int = 0
    drafts: list[Drafts] = field(default_factory=list)  # by layer, where beams are drawn
    nodes: list[list[int]] = field(default_factory=list)  # the node of each of them; NO_NODE where a hypothesis ends
    logits_index: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # by node

    @property
    def column(self) -> int:
        """Of the block in which the roots are."""
        return self.start // self.block_size

    def draw_layer(self, logits: torch.Tensor, rules: SelectRules) -> list[RowFork]:
        """Draw a layer of drafts from the draft model's joint law. Returns the rows to fork for it.

        Args:
            logits: [nodes, V] of the draft model after each node of the layer before.
        """
        law = rules.law
        assert law is not None
        assert self.rng is not None
        before, vocab_size = self.nodes[-1] if self.nodes else self.layer.nodes, logits.shape[-1]
        is_alive = torch.tensor([node != NO_NODE for node in before], device=logits.device)
        scores = torch.full((len(before),), float("-inf"), device=logits.device).masked_scatter(
            is_alive, self.layer.scores
        )
        logprobs = torch.zeros((len(before), vocab_size), device=logits.device)
        logprobs[is_alive] = log_probabilities(logits, rules.stop_token_ids if rules.masks_stops else ())
        q = joint(scores, logprobs, rules.warping)
        drafts = drafted(q, self.draft_rules, self.rng)
        forks, nodes = list[RowFork](), list[int]()
        parents, tokens = np.divmod(drafts.cells, vocab_size)
        for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True):
            if token in rules.stop_token_ids:
                nodes.append(NO_NODE)
                continue
            node, fork = self.forest.add(before[parent], token)
            nodes.append(node)
            forks += [fork] if fork is not None else []
        grown = scores[parents] + logprobs[parents, tokens]
        alive = [at for at, node in enumerate(nodes) if node != NO_NODE]
        self.layer = Layer([nodes[at] for at in alive], grown[alive], ())
        self.drafts.append(drafts)
        self.nodes.append(nodes)
        return forks

    @property
    def draft_rules(self) -> DraftRules:
        """How layers are drawn and verified."""
        law, width = self.step.rules.law, self.step.rules.width
        assert law is not None
        return DraftRules(self.grant.draft_width, width, law.min_width, law.threshold, law.replacement)


class Speculator:
    """Speculates for the groups of one runner.

    Args:
        runner: vLLM's, with a draft model and one KV cache group.
        rows: Its beam groups.
        rank_check: Compares forests between ranks; None if they are not to be compared.
    """

    def __init__(self, runner: GPUModelRunner, rows: BeamRows, rank_check: RankCheck | None) -> None:
        self._runner = runner
        self._rows = rows
        self._rank_check = rank_check
        self._draft_model = DraftModel(runner)
        self.groups: dict[str, Speculation] = {}  # of the present step

    def draft(self, output: SchedulerOutput) -> None:
        """Draft for every group with a grant, and add the rows of its forest to the batch and to `output`."""
        self.groups = {}
        for group_id, step in self._rows.steps.items():
            if step.grant is not None:
                self.groups[group_id] = self._begin(group_id, step, step.grant)
        if not self.groups:
            return
        self._catch_up()
        for number in range(1, max(one.grant.num_layers for one in self.groups.values()) + 1):
            self._draft_layer(number)
            if self._rank_check is not None:  # before ranks compute forests of different shapes together, and hang
                drafts = {group_id: one.forest.as_arrays() for group_id, one in self.groups.items()}
                self._rank_check.compare("drafts", drafts)
        for group_id, one in self.groups.items():
            self._add_rows(group_id, one, output)
        self._runner.input_batch.refresh_metadata()
        for one in self.groups.values():
            self._lay_out(one)

    def _begin(self, group_id: str, step: GroupStep, grant: Grant) -> Speculation:
        batch, rows = self._runner.input_batch, self._rows.groups[group_id]
        (index,) = self._rows.indices([group_id])
        start, block_size = int(batch.num_computed_tokens_cpu[index[0]]), self._runner.cache_config.block_size
        column = start // block_size
        num_columns = column + 1 + (grant.next_blocks is not None)  # one more may be beyond what vLLM's tables take
        blocks = np.full((len(index) + len(grant.spare_rows), num_columns), NO_BLOCK, dtype=np.int32)
        blocks[: len(index), : column + 1] = batch.block_table[0].block_table.np[index, : column + 1]
        if grant.next_blocks is not None:
            blocks[: len(index), column + 1] = grant.next_blocks
        for row, own in enumerate(grant.spare_rows, start=len(index)):
            blocks[row, column : column + len(own)] = own
        roots = rows.tokens.tolist()
        scores = torch.from_numpy(rows.scores).to(self._runner.device)
        num_layers, draft_width = grant.num_layers, grant.draft_width
        if step.rules.law is not None:
            least = step.rules.width
            num_layers, draft_width = affordable(
                len(index), len(blocks), grant.max_tokens, num_layers, draft_width, least
            )
        pending = batch.token_ids_cpu[index, rows.num_drafted : start + 1].tolist()
        rows.num_drafted = start
        return Speculation(
            step,
            replace(grant, num_layers=num_layers, draft_width=draft_width),
            rows,
            index,
            start,
            block_size,
            Forest(roots, len(blocks), grant.max_tokens),
            Layer(list(range(len(roots))), scores, range(len(roots))),
            blocks,
            pending,
            None if step.draw is None else generator(*step.draw),
        )

    def _catch_up(self) -> None:
        """Compute with the draft model what plain steps have added, so that only a few tokens are left for each row."""
        num_rows = sum(len(one.pending) for one in self.groups.values())
        per_row = max(self._runner.max_num_tokens // num_rows, 1)
        for one in self.groups.values():
            while len(one.pending[0]) > per_row:
                starts = [one.start + 1 - len(row) for row in one.pending]
                self._draft_model.logits([row[:per_row] for row in one.pending], starts, one.blocks[: len(starts)])
                one.pending = [row[per_row:] for row in one.pending]

    def _draft_layer(self, number: int) -> None:
        active = [one for one in self.groups.values() if one.grant.num_layers >= number and one.layer.nodes]
        if not active:
            return
        tokens, starts, blocks = list[list[int]](), list[int](), list[np.ndarray]()
        for one in active:
            forest = one.forest
            tokens += one.pending if number == 1 else [[forest.tokens[node]] for node in one.layer.nodes]
            starts += [one.start + number - len(row) for row in tokens[len(starts) :]]
            blocks.append(one.blocks[[forest.row_of[node] for node in one.layer.nodes]])
        columns = max(table.shape[1] for table in blocks)
        padded = [np.pad(table, ((0, 0), (0, columns - table.shape[1]))) for table in blocks]
        logits = self._draft_model.logits(tokens, starts, np.concatenate(padded))
        copies = list[tuple[int, int]]()
        for one, own in zip(active, torch.split(logits, [len(table) for table in blocks]), strict=True):
            rules = [one.step.rules, *one.grant.rules][number - 1]
            if rules.law is not None:
                forks = one.draw_layer(own, rules)
            else:
                logprobs = log_probabilities(own, rules.stop_token_ids, rules.warping.temperature)
                one.layer, forks = grow(one.forest, one.layer, logprobs, len(one.index), one.grant.draft_width)
            one.num_layers += bool(one.layer.nodes)
            for fork in forks:
                copies += self._fork(one, fork, number)
        if copies:
            self._rows.kv_blocks.copy(*np.array(copies).T)

    @staticmethod
    def _fork(one: Speculation, fork: RowFork, number: int) -> list[tuple[int, int]]:
        """Let a row begin as a copy of another. Returns the blocks to copy."""
        column = one.column
        one.blocks[fork.destination, :column] = one.blocks[fork.source, :column]
        last_written = (one.start + number - 1) // one.block_size
        return [
            (int(one.blocks[fork.source, at]), int(one.blocks[fork.destination, at]))
            for at in range(column, last_written + 1)
        ]

    def _add_rows(self, group_id: str, one: Speculation, output: SchedulerOutput) -> None:
        runner, rows = self._runner, one.rows
        first = runner.requests[group_id]
        for row in range(len(one.index), len(one.forest.rows)):
            row_id = f"{group_id}#+{row}"
            rows.spare_ids.append(row_id)
            state = runner.requests[row_id] = CachedRequestState(
                req_id=row_id,
                prompt_token_ids=[one.forest.tokens[one.forest.rows[row][0]]],  # what is computed is written below
                mm_features=[],
                sampling_params=GREEDY,
                generator=None,
                block_ids=(one.blocks[row].tolist(),),
                num_computed_tokens=one.start,
                output_token_ids=[],
                lora_request=first.lora_request,
            )
            runner.input_batch.add_request(state)
        for row_id, path in zip([*rows.row_ids, *rows.spare_ids], one.forest.rows, strict=True):
            output.total_num_scheduled_tokens += len(path) - output.num_scheduled_tokens.get(row_id, 0)
            output.num_scheduled_tokens[row_id] = len(path)

    def _lay_out(self, one: Speculation) -> None:
        batch = self._runner.input_batch
        for row, path in enumerate(one.forest.rows):
            at = self._place(one, row)
            batch.token_ids_cpu[at, one.start : one.start + len(path)] = [one.forest.tokens[node] for node in path]
        if one.grant.next_blocks is not None:
            batch.block_table[0].block_table.np[one.index, one.column + 1] = one.grant.next_blocks

    def _place(self, one: Speculation, row: int) -> int:
        """Where in the batch a row of the forest is."""
        if row < len(one.index):
            return int(one.index[row])
        return self._runner.input_batch.req_id_to_index[one.rows.spare_ids[row - len(one.index)]]

    def logits_indices(self, query_starts: np.ndarray, of_rows: np.ndarray) -> np.ndarray:
        """Which further tokens of the batch need logits: the nodes that are no row's last token.

        Args:
            query_starts: [R + 1] where each row of the batch begins among its tokens.
            of_rows: [R] where the logits after each row's last token are.
        """
        inner, count = list[int](), int(of_rows[-1]) + 1
        for one in self.groups.values():
            places = [self._place(one, row) for row in range(len(one.forest.rows))]
            one.logits_index = np.empty(one.forest.num_nodes, dtype=np.int64)
            for row, path in enumerate(one.forest.rows):
                for depth, node in enumerate(path[:-1]):
                    if one.forest.row_of[node] == row:
                        one.logits_index[node] = count + len(inner)
                        inner.append(query_starts[places[row]] + depth)
                one.logits_index[path[-1]] = of_rows[places[row]]
        return np.array(inner, dtype=np.int64)
