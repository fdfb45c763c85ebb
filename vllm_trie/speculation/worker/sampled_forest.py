"""A sampled forest: drafts are sampled from the draft model, and accepted so that the target's distribution is kept.

(Unless a request asks for acceptance by rank, which is not exact.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from vllm_trie.messages import SpeculationBudget
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.devices import NEVER, uploaded_for_search
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.sampling import search_generator
from vllm_trie.search.step import joint_search_distribution, reported_search_step
from vllm_trie.search.step_result import SearchStepResult, next_search_beams, pack_search_step, unpack_search_steps
from vllm_trie.search.strategies.joint_sampling import JointSamplingStrategy, take_strategy_cells
from vllm_trie.speculation.search.forest import affordable_forest_layers
from vllm_trie.speculation.search.rejection import (
    AcceptedLayer,
    DraftAcceptanceRules,
    Drafts,
    accept_draft_layers,
    sample_acceptable_drafts,
)
from vllm_trie.speculation.worker.forest_nodes import ROOT_OF_DEAD, VerifiedForestNodes
from vllm_trie.speculation.worker.forest_step import ForestOutcome, ForestStep

NO_SLOT = NO_NODE = -1


@dataclass(slots=True)
class SampledForestStep(ForestStep):
    """The forest of a beam sampling search."""

    strategy: JointSamplingStrategy = field(init=False)
    rng: np.random.Generator = field(init=False)
    scores: torch.Tensor = field(init=False)  # [nodes] float32, scores of the newest layer's nodes, on the device
    drafts: list[Drafts] = field(default_factory=list)  # by layer
    nodes_of_drafts: list[list[int]] = field(default_factory=list)  # by layer; NO_NODE where a hypothesis ends

    def __post_init__(self) -> None:
        ForestStep.__post_init__(self)
        assert isinstance(self.rules[0].strategy, JointSamplingStrategy)
        assert self.step.sampling_key is not None
        self.strategy, self.rng = self.rules[0].strategy, search_generator(*self.step.sampling_key)
        self.scores = self.group.beams.compete_by[0]

    @classmethod
    def affordable(cls, budget: SpeculationBudget, rules: SearchRules) -> SpeculationBudget:
        """See `ForestStep`: sampled layers must not be cut by what is sampled."""
        room = budget.max_drafts, budget.num_layers, budget.draft_width
        num_layers, draft_width = affordable_forest_layers(*room, rules.width)
        return replace(budget, num_layers=num_layers, draft_width=draft_width)

    @property
    def draft_rules(self) -> DraftAcceptanceRules:
        """How layers are sampled and verified."""
        replacement, min_width, threshold, _, top_k = self.strategy
        return DraftAcceptanceRules(
            self.budget.draft_width, self.rules[0].width, min_width, threshold, replacement, top_k
        )

    @classmethod
    def grow(cls, growing: Sequence[tuple[ForestStep, np.ndarray]], logits: torch.Tensor, number: int) -> None:
        """See `ForestStep`."""
        for forest_step, rows in growing:
            assert isinstance(forest_step, SampledForestStep)
            forest_step.sample_layer(logits[int(rows[0]) : int(rows[-1]) + 1], number)

    def sample_layer(self, logits: torch.Tensor, number: int) -> None:
        """Samples layer `number` from the draft model's logits [nodes, V] after nodes where no hypothesis ends."""
        rules = self.rules[number - 1]
        before, vocab_size = self.nodes_of_drafts[-1] if self.nodes_of_drafts else self.layer.nodes, logits.shape[-1]
        alive = uploaded_for_search(np.flatnonzero(np.array(before) != NO_NODE), logits.device)
        scores = torch.full((len(before),), NEVER, device=logits.device).index_copy(0, alive, self.scores)
        every = logits.new_zeros(len(before), vocab_size).index_copy(0, alive, logits)
        beams = self.beams_at([max(node, 0) for node in before], SearchBeams(scores[None]))
        (q,), (logprobs,) = joint_search_distribution(rules._replace(is_controlled=False), every[None], beams)
        drafts = sample_acceptable_drafts(q, self.draft_rules, self.rng)
        parents, tokens = np.divmod(drafts.cells, vocab_size)
        sampled = zip(parents.tolist(), tokens.tolist(), rules.stops.lead_nowhere(tokens), strict=True)
        nodes = [NO_NODE if ends else self.forest.add(before[parent], token) for parent, token, ends in sampled]
        going_on = np.flatnonzero(np.array(nodes) != NO_NODE)
        at, of_tokens = uploaded_for_search(np.stack([parents, tokens])[:, going_on], logits.device)
        self.layer = self.layer._replace(nodes=[nodes[place] for place in going_on])
        self.scores = scores[at] + logprobs[at, of_tokens]
        self.drafts.append(drafts)
        self.nodes_of_drafts.append(nodes)

    @classmethod
    def search(cls, nodes: Sequence[VerifiedForestNodes]) -> list[ForestOutcome]:
        """See `ForestStep`. Waits for the device in every step of every group."""
        found = []
        for of_group in nodes:
            assert isinstance(of_group.forest_step, SampledForestStep)
            found.append(of_group.forest_step.verify(of_group))
        return found

    def verify(self, nodes: VerifiedForestNodes) -> ForestOutcome:
        """Layers distributed as beam sampling's, until one was not fully drafted."""
        steps, beams, accepted = list[SearchStepResult](), [list(range(self.num_beams))], list[int]()
        slots_of_rows = np.arange(self.num_beams)  # by row of the distribution: the beam that it continues
        before, values = self.group.beams, nodes.values()
        scores = before.scores[0]
        logprobs: torch.Tensor  # of the beams before the newest step
        newest: SearchStepResult[torch.Tensor]

        def target(verified: AcceptedLayer | None) -> torch.Tensor:
            """The target's joint distribution; after the first layer, with a row for each draft of the last layer."""
            nonlocal before, logprobs
            before = self.beams_at(beams[-1], SearchBeams(scores[None]))
            (joint,), (logprobs,) = joint_search_distribution(
                self.rules[len(steps)], values[nodes.index(beams[-1])][None], before
            )
            of_rows = joint[np.maximum(slots_of_rows, 0)]
            of_rows[slots_of_rows < 0] = 0.0
            return of_rows

        def take(cells: np.ndarray) -> tuple[SearchStepResult, np.ndarray]:
            nonlocal newest
            rules, sampled = self.rules[len(steps)], torch.from_numpy(cells).to(logprobs.device)
            choice, slots = take_strategy_cells(
                rules, logprobs, scores, sampled, nodes.inputs(rules, lambda: beams[-1])
            )
            newest = reported_search_step(rules, choice)
            every = rules._replace(strategy=self.strategy._replace(keeps_one=False))
            _, words, layout = pack_search_step(newest, every.layout(*logprobs.shape))
            (on_host,) = unpack_search_steps(words.cpu().numpy(), layout)
            return on_host, slots.cpu().numpy()

        for verified in accept_draft_layers(self.drafts, target, self.draft_rules, self.rng):
            rows, tokens = np.divmod(verified.cells, logprobs.shape[-1])
            step, slots = take(slots_of_rows[rows] * logprobs.shape[-1] + tokens)
            steps.append(step)
            accepted.append(int((verified.drafts >= 0).sum()))
            if not verified.is_complete or step.num_beams == 0 or self.rules[len(steps) - 1].is_last:
                break
            layer = self.nodes_of_drafts[len(steps) - 1]
            slots_of_rows, scores = np.full(len(layer), NO_SLOT), newest.scores[0]
            slots_of_rows[verified.drafts] = slots
            at = {int(slot): layer[draft] for slot, draft in zip(slots, verified.drafts, strict=True) if slot >= 0}
            beams.append([at.get(slot, ROOT_OF_DEAD) for slot in range(len(step.scores))])
        if not steps:  # nothing is possible: the search ends
            steps.append(take(np.zeros(0, dtype=np.int64))[0])
            accepted.append(0)
        kept = self.strategy.going_on(newest)
        newest_tokens = kept.tokens[0].long()
        return ForestOutcome(
            [*steps[:-1], self.strategy.going_on(steps[-1])],
            beams[: len(steps)],
            accepted,
            newest_tokens,
            before.after(next_search_beams(kept)),
        )
