"""Searches over steps, written plainly from their papers: brute force, nothing kept but a tree of texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from vllm_trie.step_search.hypotheses import derived_step_seed


class Found(NamedTuple):
    text: str
    tokens: tuple[int, ...]
    score: float
    reason: str


class Sampled(NamedTuple):
    text: str
    tokens: tuple[int, ...]
    reason: str | None  # None: it came to a delimiter


Draw = Callable[[tuple[int, ...], int, int, bool], Sampled]  # tokens so far, seed, most tokens, stops at delimiters
Score = Callable[[str], float]


@dataclass(frozen=True)
class Node:
    """One candidate of the tree."""

    number: tuple[int, ...] = ()  # of each step on the way here, among those sampled where it was
    text: str = ""
    tokens: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()  # tokens up to the end of each step
    score: float = 0.0
    reason: str | None = None


@dataclass(frozen=True)
class Task:
    """What is searched, and how."""

    draw: Draw
    score: Score
    width: int
    candidates: int
    max_tokens: int
    max_steps: int | None = None
    stops_early: bool = False
    seed: int = 0
    look: Callable[[tuple[int, ...], int], str] | None = None  # the text of the most probable tokens behind these
    lookahead: int = 0

    def child(self, node: Node, number: int, depth: int) -> Node:
        """The candidate of this number after a node, which is sampled in this round."""
        is_last = self.max_steps is not None and depth == self.max_steps - 1
        seed = derived_step_seed(self.seed, (*node.number, number))
        sampled = self.draw(node.tokens, seed, self.max_tokens - len(node.tokens), not is_last)
        text, tokens = node.text + sampled.text, node.tokens + sampled.tokens
        reason = sampled.reason or ("length" if len(tokens) == self.max_tokens else None)
        ahead = ""
        if self.look and reason is None:
            ahead = self.look(tokens, min(self.lookahead, self.max_tokens - len(tokens)))
        return Node((*node.number, number), text, tokens, (*node.ends, len(tokens)), self.score(text + ahead), reason)

    def best(self, completed: Sequence[Node]) -> list[Node]:
        """The best `width` of these, each text once, the first of its kind."""
        distinct = list[Node]()
        for node in completed:
            if all(node.text != other.text for other in distinct):
                distinct.append(node)
        return sorted(distinct, key=lambda node: -node.score)[: self.width]


def found(nodes: Sequence[Node]) -> list[Found]:
    return [Found(node.text, node.tokens, node.score, node.reason or "") for node in nodes]


def apart(nodes: Sequence[Node]) -> list[Node]:
    """Best first, each text once if it has ended, and once if it has not."""
    kept = list[Node]()
    for node in nodes:
        if all((node.text, node.reason is None) != (other.text, other.reason is None) for other in kept):
            kept.append(node)
    return sorted(kept, key=lambda node: -node.score)


def beam_search(task: Task) -> list[Found]:
    """Search-and-learn's beam search: the best `width` texts, best first."""
    beams, completed, depth = [Node()], list[Node](), 0
    while beams:
        places = range(task.width * task.candidates)
        sampled = [task.child(beams[i % len(beams)], i // len(beams), depth) for i in places]
        nodes, depth = apart(sampled), depth + 1
        completed = task.best([*completed, *(node for node in nodes if node.reason)])
        beams = [node for node in nodes if not node.reason][: task.width]
        if task.stops_early and len(completed) == task.width:
            break
    return found(completed)


def dvts(task: Task) -> list[Found]:
    """One subtree after the other, each to its end; in no order."""
    completed = list[Node]()
    for subtree in range(task.width):
        sampled = [task.child(Node(), subtree + task.width * i, 0) for i in range(task.candidates)]
        depth = 1
        while not (node := max(sampled, key=lambda node: node.score)).reason:
            sampled = [task.child(node, i, depth) for i in range(task.candidates)]
            depth += 1
        completed.append(node)
    return found(task.best(completed))


def best_first(task: Task) -> list[Found]:
    """Every round expands the best of all nodes that were never expanded, wherever they are."""
    chosen, opened, completed, depth = [Node()], list[Node](), list[Node](), 0
    while chosen and depth != task.max_steps:
        places = range(task.width * task.candidates)
        nodes = apart([task.child(chosen[i % len(chosen)], i // len(chosen), depth) for i in places])
        depth += 1
        completed = task.best([*completed, *(node for node in nodes if node.reason)])
        if task.stops_early and len(completed) == task.width:
            break
        opened = sorted([*opened, *(node for node in nodes if not node.reason)], key=lambda node: -node.score)
        chosen, opened = opened[: task.width], opened[task.width :]
    return found(completed)


def mcts(task: Task, exploration: float) -> list[Found]:
    """MCTS without rollouts: selection by UCT, expansion, the score as the value, and all of it counted anew each time.

    A round selects `width` leaves. Each is worth `candidates` visits at once to whoever selects next, as in WU-UCT.
    """
    chosen, opened, judged, completed, depth = [Node()], list[Node](), list[Node](), list[Node](), 0
    while chosen and depth != task.max_steps:
        places = range(task.width * task.candidates)
        nodes = apart([task.child(chosen[i % len(chosen)], i // len(chosen), depth) for i in places])
        depth += 1
        completed = task.best([*completed, *(node for node in nodes if node.reason)])
        if task.stops_early and len(completed) == task.width:
            break
        judged += nodes
        opened += [node for node in nodes if not node.reason]
        chosen = []
        while opened and len(chosen) < task.width:
            chosen.append(descend((), opened, judged, chosen * task.candidates, exploration))
            opened.remove(chosen[-1])
    return found(completed)


def descend(
    at: tuple[int, ...], opened: Sequence[Node], judged: Sequence[Node], pending: Sequence[Node], exploration: float
) -> Node:
    """The open node beneath a place of the tree that UCT leads to."""
    for node in opened:
        if node.number == at:
            return node

    def beneath(place: tuple[int, ...], nodes: Sequence[Node]) -> list[Node]:
        return [node for node in nodes if node.number[: len(place)] == place]

    def visits(place: tuple[int, ...]) -> int:
        return len(beneath(place, judged)) + len(beneath(place, pending))

    def value(number: int) -> float:
        place, scores = (*at, number), [node.score for node in beneath((*at, number), judged)]
        return sum(scores) / len(scores) + exploration * math.sqrt(math.log(visits(at)) / visits(place))

    numbers = sorted({node.number[len(at)] for node in beneath(at, opened)})
    return descend((*at, max(numbers, key=value)), opened, judged, pending, exploration)


def rebase(task: Task, temperature: float, price: float, returns: bool = False) -> list[Found]:
    """Algorithm of "Inference Scaling Laws", section 3.2: the budget is the number of solutions that are still to come.

    With a price, ETS's objective prunes what could go on before the budget is shared. If the search returns, what got
    no share may get one later.
    """
    without = list[Node]()
    live, shares, completed, depth = [Node()], [task.width * task.candidates], list[Node](), 0
    budget = task.width * task.candidates
    while budget and live:
        sampled = [
            task.child(node, i, depth) for i in range(budget) for node, n in zip(live, shares, strict=True) if i < n
        ]
        assert len(sampled) == budget
        budget -= sum(node.reason is not None for node in sampled)
        nodes, depth = apart(sampled), depth + 1
        completed = task.best([*completed, *(node for node in nodes if node.reason)])
        if task.stops_early and len(completed) == task.width:
            break
        live = sorted([*without, *(node for node in nodes if not node.reason)], key=lambda node: -node.score)
        everyone = live
        shares = shared([node.score for node in live], budget, temperature)
        if price and budget and live:
            live = pruned(live, shares, price)
            shares = shared([node.score for node in live], budget, temperature)
        expanded = [node for node, share in zip(live, shares, strict=True) if share]
        without = [node for node in everyone if node not in expanded] if returns else []
    return found(completed)


def shared(scores: list[float], budget: int, temperature: float) -> list[int]:
    """By softmax, rounded down; what is left goes, one by one, to who lacks most."""
    if not scores:
        return []
    weights = np.exp(np.array(scores) / temperature)
    exact = weights / weights.sum() * budget
    shares = np.floor(exact + 1e-9).astype(int)
    while shares.sum() < budget:
        lacking = exact - shares
        shares[np.flatnonzero(lacking > lacking.max() - 1e-9)[0]] += 1
    return [*map(int, shares)]


def worth(nodes: Sequence[Node], shares: Sequence[int], everything: float, price: float) -> float:
    """ETS's objective (arXiv 2502.13575) without its third term, of some leaves."""
    return sum(shares) / everything - price * kv_tokens(nodes)


def kv_tokens(nodes: Sequence[Node]) -> int:
    """Tokens of distinct steps on the ways to these nodes."""
    steps = {node.number[: i + 1]: end - start for node in nodes for i, (start, end) in enumerate(spans(node))}
    return sum(steps.values())


def spans(node: Node) -> list[tuple[int, int]]:
    return [*zip((0, *node.ends), node.ends, strict=False)]


def pruned(live: list[Node], shares: list[int], price: float) -> list[Node]:
    """The set of leaves that is worth most, of all sets; of several the largest."""
    total, per_token = sum(shares), price / kv_tokens(live)
    places = range(len(live))
    sets = [chosen for size in places for chosen in combinations(places, size + 1)]

    def value(chosen: tuple[int, ...]) -> tuple[float, int]:
        nodes, of_these = [live[i] for i in chosen], [shares[i] for i in chosen]
        return round(worth(nodes, of_these, total, per_token), 9), len(chosen)

    return [live[i] for i in max(sets, key=value)]
