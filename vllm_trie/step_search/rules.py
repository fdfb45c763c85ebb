"""The rules of a search by steps, as `opening.py` derives them from its options."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_trie.options.parts import Allot, Order


@dataclass(frozen=True)
class StepRules:
    """The rules of one search.

    Args:
        width: Beams that go on after each round, and finished hypotheses that are kept.
        candidates: Candidates of a round, per beam of `width`.
        max_tokens: The most tokens that a hypothesis can have.
        max_steps: Rounds; in the last one candidates are sampled to their end. None: as many as it takes.
        stops_early: Whether the search is over once `width` hypotheses are finished.
        seed: Of sampling.
        allot: How the candidates of a round are shared out.
        allot_temperature: Of REBASE's softmax of scores.
        prefer_shared: ETS's price of the KV that only one beam needs.
        order: The order in which open candidates are expanded.
        exploration: How strongly MCTS prefers rarely visited candidates.
        lookahead: Greedy tokens after each candidate, for the scorer only.
    """

    width: int
    candidates: int
    max_tokens: int
    max_steps: int | None
    stops_early: bool
    seed: int
    allot: Allot = "even"
    allot_temperature: float = 0.2
    prefer_shared: float = 0.0
    order: Order = "breadth"
    exploration: float = 1.0
    lookahead: int = 0
