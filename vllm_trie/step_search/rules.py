"""What a search by steps asks for."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_trie.options.parts import Allot, Order


@dataclass(frozen=True)
class StepRules:
    """What one search asks for.

    Args:
        width: Beams that go on after each round, and finished hypotheses that are kept.
        candidates: Candidates of a round, per beam of `width`.
        max_tokens: The most tokens that a hypothesis can have.
        max_steps: Rounds; in the last one candidates are drawn to their end. None: as many as it takes.
        stops_early: Whether the search is over once `width` hypotheses are finished.
        seed: Decides what is drawn.
        allot: Who gets the candidates of a round.
        allot_temperature: Of REBASE's softmax of scores.
        prefer_shared: What ETS takes off the weight of beams for the KV that they alone need.
        order: Whether a round expands candidates of the round before it, or any that are open.
        exploration: How much MCTS prefers what it has visited rarely.
        lookahead: Tokens that are drawn greedily behind each candidate, for the scorer to see.
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
