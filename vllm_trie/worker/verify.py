"""What of a forest the search keeps: it takes its own steps as long as the forest has what they lead to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vllm_trie.messages import Decided, Drafted
from vllm_trie.search.step import Step
from vllm_trie.worker.rows import BeamRows
from vllm_trie.worker.selection import Selection
from vllm_trie.worker.speculate import Speculation, Speculator

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
        steps, beams = _beam_search(rows, group_id, one, of_nodes, control)
        tokens = speculator.commit(one, steps, beams)
        one.rows.scores, one.rows.tokens = steps[-1].scores, steps[-1].tokens
        places = torch.from_numpy(one.index).to(sampled.device)
        sampled[places, : tokens.shape[1]] = torch.from_numpy(tokens.astype(np.int32)).to(sampled.device)
        accepted = [0, *(len(set(nodes)) for nodes in beams[1:])]
        decided[group_id] = Decided(steps, Drafted(one.num_layers, one.forest.num_nodes - len(one.index), accepted))
    return decided


def _beam_search(
    rows: BeamRows, group_id: str, one: Speculation, logits: torch.Tensor, control: Control
) -> tuple[list[Step], list[list[int]]]:
    """Plain beam search's own steps, until a new beam was not drafted.

    Returns:
        The steps, and for each the nodes that its beams were before it.
    """
    rules, forest = one.step.rules, one.forest
    strings = rows.stop_strings(rules.stop_strings, rules.skip_special_tokens) if rules.stop_strings else None
    scores, steps, beams = one.rows.scores, list[Step](), [list(range(len(one.index)))]
    for rules in [one.step.rules, *one.grant.rules]:
        nodes = beams[-1]

        def history(_: int, row: int, nodes: list[int] = nodes) -> tuple[list[int], list[int]]:
            root, *path = forest.path(nodes[row])
            prompt, generated = rows.history(group_id, root)
            return prompt, generated + [forest.tokens[node] for node in path]

        own = logits[nodes]
        if rules.is_controlled:
            roots = one.index[[forest.path(node)[0] for node in nodes]]
            own = control(own, roots, [history(0, row)[1] for row in range(len(nodes))])
        selection = Selection(
            rules, torch.from_numpy(scores)[None].to(logits.device), history, strings, [one.step.draw]
        )
        step = selection.step(own[None]).group(0, selection.tops(0))
        steps.append(step)
        scores = step.scores
        drafted = [forest.child(nodes[p], t) for p, t in zip(step.parents.tolist(), step.tokens.tolist(), strict=True)]
        if rules.is_last or step.num_beams < len(nodes) or None in drafted:
            break
        beams.append([node for node in drafted if node is not None])
    return steps, beams[: len(steps)]
