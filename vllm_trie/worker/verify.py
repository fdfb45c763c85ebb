"""What of a forest the search keeps: it takes its own steps as long as the forest has what they lead to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vllm_trie.messages import Decided, Drafted, SelectRules
from vllm_trie.search.speculation import Verified, verified_layers
from vllm_trie.search.step import Step, best_of
from vllm_trie.worker.commit import commit
from vllm_trie.worker.rows import BeamRows
from vllm_trie.worker.selection import Selection
from vllm_trie.worker.speculate import Speculation, Speculator

NO_SLOT = -1
DEAD = np.float32(-np.inf)
ROOT_OF_DEAD = 0  # what stands for the node of a beam that is dead, and which nothing continues

Control = Callable[[torch.Tensor, np.ndarray, list[list[int]]], torch.Tensor]


def verify(
    rows: BeamRows, speculator: Speculator, logits: torch.Tensor, control: Control, sampled: torch.Tensor
) -> dict[str, Decided]:
    """Take as many steps as the forest holds of every group that speculates.

    Args:
        rows: The groups; their scores, newest tokens and places in the batch are updated.
        speculator: Has laid out their forests.
        logits: [N, V], of all nodes among others, unprocessed.
        control: See `SpeculatingModelRunner.controlled_after`.
        sampled: [R, ...], receives the new tokens of every row of a group.

    Returns:
        What was decided, by group.
    """
    decided = {}
    for group_id, one in speculator.groups.items():
        of_nodes = logits[torch.from_numpy(one.logits_index).to(logits.device)]
        search = _beam_search if one.step.rules.law is None else _beam_sampling
        steps, beams, accepted = search(_Nodes(rows, group_id, one, of_nodes, control))
        tokens = commit(rows, one, steps, beams)
        one.rows.scores, one.rows.tokens = steps[-1].scores, steps[-1].tokens
        places = torch.from_numpy(one.index).to(sampled.device)
        sampled[places, : tokens.shape[1]] = torch.from_numpy(tokens.astype(np.int32)).to(sampled.device)
        decided[group_id] = Decided(steps, Drafted(one.forest.num_nodes - len(one.index), accepted))
    return decided


class _Nodes:
    """The nodes of one group's forest, and what the target says after each.

    Args:
        logits: [nodes, V].
    """

    def __init__(
        self, rows: BeamRows, group_id: str, speculation: Speculation, logits: torch.Tensor, control: Control
    ) -> None:
        self.speculation = speculation
        self.forest = speculation.forest
        self.rules = [speculation.step.rules, *speculation.grant.rules]  # by step
        self._rows = rows
        self._group_id = group_id
        self._logits = logits
        self._control = control

    def selection(self, rules: SelectRules, nodes: list[int], scores: np.ndarray) -> Selection:
        """A step of beams that are at `nodes`, with cumulative `scores` [b]."""
        strings = None
        if rules.stop_strings:
            strings = self._rows.stop_strings(rules.stop_strings, rules.skip_special_tokens)
        of_beams = torch.from_numpy(scores)[None].to(self._logits.device)
        draws = [self.speculation.step.draw]
        return Selection(rules, of_beams, lambda _, beam: self._history(nodes[beam]), strings, draws)

    def logits(self, rules: SelectRules, nodes: list[int]) -> torch.Tensor:
        """[1, nodes, V], with penalties and the like applied."""
        logits = self._logits[nodes]
        if rules.is_controlled:
            roots = self.speculation.index[[self.forest.path(node)[0] for node in nodes]]
            logits = self._control(logits, roots, [self._history(node)[1] for node in nodes])
        return logits[None]

    def _history(self, node: int) -> tuple[list[int], list[int]]:
        root, *path = self.forest.path(node)
        prompt, generated = self._rows.history(self._group_id, root)
        return prompt, generated + [self.forest.tokens[node] for node in path]


Found = tuple[
    list[Step], list[list[int]], list[int]
]  # steps, the nodes of the beams before each, drafts accepted by each


def _beam_search(nodes: _Nodes) -> Found:
    """Plain beam search's own steps, until one depends on a beam that was not drafted.

    It does not if whatever lives on is better than that beam itself: what follows a beam is no better than it is.
    """
    forest, scores = nodes.forest, nodes.speculation.rows.scores
    steps, beams, accepted = list[Step](), [list(range(len(scores)))], [0]
    unseen = DEAD
    for rules in nodes.rules:
        selection = nodes.selection(rules, beams[-1], scores)
        step = selection.step(nodes.logits(rules, beams[-1])).group(0, selection.tops(0))
        if unseen > DEAD and not (step.num_beams == rules.width and step.scores.min() > unseen):
            break
        steps.append(step)
        chosen = zip(step.parents.tolist(), step.tokens.tolist(), strict=True)
        drafts = [forest.child(beams[-1][parent], token) for parent, token in chosen]
        is_seen = np.array([draft is not None for draft in drafts])
        if rules is nodes.rules[-1] or rules.is_last or step.num_beams < len(drafts) or not is_seen.any():
            break
        if not is_seen.all() and not rules.ranks_together:
            break
        unseen = step.scores[~is_seen].max(initial=DEAD)
        scores = np.where(is_seen, step.scores, DEAD)
        beams.append([ROOT_OF_DEAD if draft is None else draft for draft in drafts])
        accepted.append(int(is_seen.sum()))
    return steps, beams[: len(steps)], accepted[: len(steps)]


def _beam_sampling(nodes: _Nodes) -> Found:
    """Layers that have beam sampling's law, until one was not drafted in full."""
    one = nodes.speculation
    assert one.rng is not None
    steps, beams, accepted = list[Step](), [list(range(len(one.index)))], list[int]()
    slots_of_rows = np.arange(len(one.index))  # by row of the law: the beam that it continues
    scores = one.rows.scores
    selection: Selection

    def law(verified: Verified | None) -> torch.Tensor:
        """The target's law; for a layer after the first with a row for each draft of the layer before."""
        nonlocal selection
        rules = nodes.rules[len(steps)]
        selection = nodes.selection(rules, beams[-1], scores)
        of_beams = selection.law(nodes.logits(rules, beams[-1]))
        of_rows = of_beams[np.maximum(slots_of_rows, 0)]
        of_rows[slots_of_rows < 0] = 0.0
        return of_rows

    for verified in verified_layers(one.drafts, law, one.draft_rules, one.rng):
        vocab_size = selection.logprobs.shape[-1]
        rows, tokens = np.divmod(verified.cells, vocab_size)
        step, slots = selection.take(slots_of_rows[rows] * vocab_size + tokens)
        steps.append(step.group(0, selection.tops(0)))
        accepted.append(int((verified.drafts >= 0).sum()))
        if not verified.is_complete or steps[-1].num_beams == 0 or nodes.rules[len(steps) - 1].is_last:
            break
        layer = one.nodes[len(steps) - 1]
        slots_of_rows, scores = np.full(len(layer), NO_SLOT), steps[-1].scores
        slots_of_rows[verified.drafts] = slots
        at = {int(slot): layer[draft] for slot, draft in zip(slots, verified.drafts, strict=True) if slot >= 0}
        beams.append([at.get(slot, ROOT_OF_DEAD) for slot in range(len(scores))])
    if not steps:  # nothing is possible any more: the search ends
        step, _ = selection.take(np.zeros(0, dtype=np.int64))
        steps.append(step.group(0, selection.tops(0)))
        accepted.append(0)
    law_of_group = one.step.rules.law
    if law_of_group is not None and law_of_group.keeps_one:
        steps[-1] = best_of(steps[-1])
    return steps, beams[: len(steps)], accepted
