"""One group's forest in one step: it grows in `draft`, and is judged in `verify`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_trie.messages import GroupStep, SpeculationBudget
from vllm_trie.search.devices import NEVER
from vllm_trie.search.filters import log_probabilities
from vllm_trie.search.forest import Forest, Layer, RowFork, grow
from vllm_trie.search.item_trie import ItemRules, ItemTrie
from vllm_trie.search.lookup import Continuations, add_drafts
from vllm_trie.search.ngrams import NOTHING, without_repeats
from vllm_trie.search.rejection import DraftRules, Drafts, drafted
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.step import joint_distribution
from vllm_trie.worker.rows import GroupRows

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
    trie: ItemTrie | None = None  # along which beams go
    states: torch.Tensor | None = None  # [nodes] int64 on the device, where each is in it
    histories: torch.Tensor | None = (
        None  # [beams, start + 1] of each beam up to its root, where none may repeat n-grams
    )
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
        sampling, width = self.step.rules.beam_sampling, self.step.rules.width
        assert sampling is not None
        return DraftRules(self.budget.draft_width, width, sampling.min_width, sampling.threshold, sampling.replacement)

    def histories_of(self, nodes: Sequence[int]) -> torch.Tensor | None:
        """[nodes, L] all tokens up to these nodes, which are equally deep, but for roots that stand for dead beams."""
        if self.histories is None:
            return None
        paths = [self.forest.path(node) for node in nodes]
        drafted = np.full((len(paths), max(map(len, paths)) - 1), NOTHING, dtype=np.int32)
        for row, path in enumerate(paths):
            drafted[row, : len(path) - 1] = [self.forest.tokens[node] for node in path[1:]]
        on_device = torch.from_numpy(drafted).to(self.histories.device)
        return torch.cat([self.histories[[path[0] for path in paths]], on_device], dim=1)

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
        if rules.beam_sampling is not None:
            forks = self._draw_layer(logits, rules)
        else:
            logprobs = log_probabilities(logits, rules.stop_token_ids, rules.filters.temperature)
            if self.trie is not None and rules.items is not None and self.states is not None:
                states = self.states[self.layer.nodes]
                logprobs = self.trie.masked(rules.items, states, logprobs, rules.stop_token_ids)
            if (histories := self.histories_of(self.layer.nodes)) is not None:
                logprobs = without_repeats(logprobs, histories, rules.no_repeat_ngram_size)
            self.forest.open_rows(math.sqrt(number / self.budget.num_layers))  # or the first layer would take them all
            self.layer, forks = grow(self.forest, self.layer, logprobs, self.num_beams, self.budget.draft_width)
            self._follow(rules.items, self.layer.nodes)
        self.num_layers += bool(self.layer.nodes)
        return forks

    def add_layers(self, found: Continuations) -> list[tuple[int, int]]:
        """Draft all layers at once. Returns the blocks to copy."""
        for nodes in add_drafts(self.forest, found, self.budget.draft_width):
            self._follow(self.step.rules.items, nodes)
            self.num_layers += 1
        copies = list[tuple[int, int]]()
        for row in range(self.num_beams, len(self.forest.rows)):
            copies += self.fork(RowFork(self.forest.rows[row][0], row), 1)  # the target computes all that was drafted
        return copies

    def _follow(self, rules: ItemRules | None, nodes: list[int]) -> None:
        """Note where the nodes of the newest layer are in the catalog."""
        if self.trie is None or rules is None or self.states is None or not nodes:
            return
        parents = [self.forest.parents[node] for node in nodes]
        tokens = torch.tensor([self.forest.tokens[node] for node in nodes], device=self.states.device)
        self.states = torch.cat([self.states, self.trie.advance(rules, self.states[parents], tokens)])

    def _draw_layer(self, logits: torch.Tensor, rules: SelectRules) -> list[RowFork]:
        """Draw a layer of drafts from the draft model's joint distribution."""
        assert self.rng is not None
        before, vocab_size = self.nodes[-1] if self.nodes else self.layer.nodes, logits.shape[-1]
        is_alive = torch.tensor([node != NO_NODE for node in before], device=logits.device)
        scores = torch.full((len(before),), NEVER, device=logits.device)
        scores[is_alive] = self.layer.scores
        of_all = logits.new_zeros(len(before), vocab_size)
        of_all[is_alive] = logits
        histories = self.histories_of([max(node, 0) for node in before])
        rules_of_drafts = rules._replace(is_controlled=False)
        q, logprobs = joint_distribution(rules_of_drafts, of_all, scores, histories=histories)
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
