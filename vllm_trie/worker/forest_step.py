"""One group's forest in one step: it grows in `draft`, and is judged in `verify`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_trie.messages import GroupStep, SpeculationBudget
from vllm_trie.search.beams import Beams, States, gather_states
from vllm_trie.search.devices import NEVER
from vllm_trie.search.forest import Forest, Layer, RowFork, grow
from vllm_trie.search.lookup import Continuations, add_drafts
from vllm_trie.search.rejection import DraftRules, Drafts, drafted
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.step import draft_logprobs, joint_distribution
from vllm_trie.search.strategies.drawn import Drawn
from vllm_trie.worker.group_rows import GroupRows

NO_NODE = -1


@dataclass(slots=True)
class ForestStep:
    """One group's forest in one step."""

    step: GroupStep
    budget: SpeculationBudget
    group: GroupRows
    start: int  # position of the roots: as many tokens are computed
    block_sizes: list[int]  # by KV cache group
    forest: Forest
    layer: Layer
    blocks: list[np.ndarray]  # by KV cache group: [rows, columns] int32 of every row, up to the last it may write
    rng: np.random.Generator | None  # of what is drawn
    states: States  # [1, nodes, ...], under each constraint, on the device
    num_layers: int = 0
    pending: list[list[int]] = field(default_factory=list)  # of each beam the tokens that a draft model has to compute
    drafts: list[Drafts] = field(default_factory=list)  # by layer, where beams are drawn
    nodes: list[list[int]] = field(default_factory=list)  # the node of each of them; NO_NODE where a hypothesis ends
    spare_ids: list[str] = field(default_factory=list)  # of the rows that are no beam's
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # of all rows

    @property
    def num_beams(self) -> int:
        """Rows that are beams' own."""
        return len(self.group.row_ids)

    @property
    def rules(self) -> list[SelectRules]:
        """By step."""
        return [self.step.rules, *self.budget.rules]

    @property
    def columns(self) -> list[int]:
        """By KV cache group: that of the block in which the roots are."""
        return [self.start // block_size for block_size in self.block_sizes]

    @property
    def draft_rules(self) -> DraftRules:
        """How layers are drawn and verified."""
        strategy, width = self.step.rules.strategy, self.step.rules.width
        assert isinstance(strategy, Drawn)
        return DraftRules(self.budget.draft_width, width, strategy.min_width, strategy.threshold, strategy.replacement)

    def beams_at(self, nodes: Sequence[int], beams: Beams) -> Beams:
        """These beams, which have come to these nodes, with the states that they have there."""
        if not self.states:
            return beams
        return beams._replace(states=gather_states(self.states, self._on_device(nodes)))

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        """[1, numbers] int64."""
        return async_tensor_h2d([[*numbers]], device=self.layer.scores.device, dtype=torch.int64)

    def fork(self, fork: RowFork, number: int) -> list[tuple[int, int]]:
        """Let a row begin as a copy of another, at layer `number`. Returns the blocks to copy."""
        copies = list[tuple[int, int]]()
        for table, column, block_size in zip(self.blocks, self.columns, self.block_sizes, strict=True):
            source, destination = table[fork.source], table[fork.destination]
            destination[:column] = source[:column]
            written = slice(column, (self.start + number - 1) // block_size + 1)
            copies += zip(source[written].tolist(), destination[written].tolist(), strict=True)
        return copies

    def add_layer(self, logits: torch.Tensor, number: int) -> list[RowFork]:
        """Draft layer `number` as the search will select in that step. Returns the rows to fork for it.

        Args:
            logits: [nodes, V] of the draft model after each node of the layer before.
        """
        rules = self.rules[number - 1]
        if isinstance(rules.strategy, Drawn):
            forks = self._draw_layer(logits, rules)
        else:
            (logprobs,) = draft_logprobs(
                rules, logits[None], self.beams_at(self.layer.nodes, Beams(self.layer.scores[None]))
            )
            self.forest.open_rows(math.sqrt(number / self.budget.num_layers))  # or the first layer would take them all
            self.layer, forks = grow(self.forest, self.layer, logprobs, self.num_beams, self.budget.draft_width)
            self._follow(self.layer.nodes)
        self.num_layers += bool(self.layer.nodes)
        return forks

    def add_layers(self, found: Continuations) -> list[tuple[int, int]]:
        """Draft all layers at once. Returns the blocks to copy."""
        for nodes in add_drafts(self.forest, found, self.budget.draft_width):
            self._follow(nodes)
            self.num_layers += 1
        copies = list[tuple[int, int]]()
        for row in range(self.num_beams, len(self.forest.rows)):
            copies += self.fork(RowFork(self.forest.rows[row][0], row), 1)  # the target computes all that was drafted
        return copies

    def _follow(self, nodes: Sequence[int]) -> None:
        """Advance to the nodes of the newest layer, the only ones whose states are not known."""
        if not self.states or not nodes:
            return
        parents = self._on_device([self.forest.parents[node] for node in nodes])
        tokens = self._on_device([self.forest.tokens[node] for node in nodes])
        before = gather_states(self.states, parents)
        self.states = {
            key: torch.cat([of_all, key.advance(before[key], tokens)], 1) for key, of_all in self.states.items()
        }

    def _draw_layer(self, logits: torch.Tensor, rules: SelectRules) -> list[RowFork]:
        """Draw a layer of drafts from the draft model's joint distribution."""
        assert self.rng is not None
        before, vocab_size = self.nodes[-1] if self.nodes else self.layer.nodes, logits.shape[-1]
        is_alive = torch.tensor([node != NO_NODE for node in before], device=logits.device)
        scores = torch.full((len(before),), NEVER, device=logits.device)
        scores[is_alive] = self.layer.scores
        of_all = logits.new_zeros(len(before), vocab_size)
        of_all[is_alive] = logits
        beams = self.beams_at([max(node, 0) for node in before], Beams(scores[None]))
        q, logprobs = (
            of_group[0] for of_group in joint_distribution(rules._replace(is_controlled=False), of_all[None], beams)
        )
        num_known = self.forest.num_nodes
        drafts = drafted(q, self.draft_rules, self.rng)
        forks, nodes = list[RowFork](), list[int]()
        parents, tokens = np.divmod(drafts.cells, vocab_size)
        for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True):
            if token in rules.stops.token_ids:
                nodes.append(NO_NODE)
                continue
            node, fork = self.forest.add(before[parent], token)
            nodes.append(node)
            forks += [fork] if fork is not None else []
        self._follow(range(num_known, self.forest.num_nodes))
        grown = scores[parents] + logprobs[parents, tokens]
        alive = [at for at, node in enumerate(nodes) if node != NO_NODE]
        self.layer = Layer([nodes[at] for at in alive], grown[alive], ())
        self.drafts.append(drafts)
        self.nodes.append(nodes)
        return forks
