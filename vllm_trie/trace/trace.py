"""The result of `trace=True` as an object: `Trace` and its parts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

PLUGIN_NAME = "trie_beam"  # a copy: `options` needs packages that a reader of traces may lack


class Finished(NamedTuple):
    """Finished hypotheses in the order in which they finished: [F] each."""

    steps: list[int]  # in which their last tokens were generated
    parents: list[int]  # the slots, one step before, that they continue
    tokens: list[int]  # their last tokens, including stop tokens
    scores: list[float]  # cumulative log-probabilities, in nats


@dataclass(frozen=True)
class Forest:
    """The drafts of one forward pass: [D] each.

    Args:
        step: The first step of the forward pass: drafts of the first layer belong to this step, drafts of the second
            layer to the next step, and so on.
        parents: The draft that each continues, or -1 - slot: the beam in that slot before `step`.
        tokens: The token of each.
    """

    step: int
    parents: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Trace:
    """One search. Steps, one token each, count from 0, and so do slots, the places of beams.

    Args:
        prompt_length: In tokens.
        block_size: Tokens of a KV block.
        parents: [S][b] the slot that the beam in each slot continues, one step before; in the first step 0, the prompt.
        tokens: [S][b] its newest token.
        scores: [S][b] its cumulative log-probability in nats, rounded to five decimals; None if the slot has no beam.
        finished: The finished hypotheses. There are no beams for the last step of the search.
        returned: [n] the numbers, in `finished`, of the returned hypotheses, best first.
        forests: If the search speculates, one per forward pass that verified drafts.
        accepted: [S][b] the draft, of the step's forward pass, that became the beam; -1 if it was not drafted. [] if a
            step accepts no drafts. The beams of a forward pass's last step need none.
        blocks: [S] how many KV blocks all beams together hold after the step, and how many leading ones of these they
            all share; None between the steps of a forward pass, in the first step and without KV blocks.
        texts: By token; empty without a tokenizer.
    """

    prompt_length: int
    block_size: int
    parents: list[list[int]]
    tokens: list[list[int]]
    scores: list[list[float | None]]
    finished: Finished
    returned: list[int]
    forests: list[Forest] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)
    blocks: list[tuple[int, int] | None] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: Any) -> Trace:
        """The trace of an answer.

        Args:
            answer: A `RequestOutput` of vLLM, a server's response as an object or as parsed JSON, or `as_dict`.

        Raises:
            ValueError: the answer has no trace.
        """
        found = _found_trace_fields(answer)
        if found is None:
            raise ValueError("this answer has no trace; ask for one with trace=True")
        finished = Finished(**found["finished"])
        forests = [Forest(**forest) for forest in found["forests"]]
        blocks = [counts and (counts[0], counts[1]) for counts in found["blocks"]]
        own = {"finished": finished, "forests": forests, "blocks": blocks, "texts": dict(found["texts"])}
        return cls(**{**found, **own})

    @property
    def num_steps(self) -> int:
        """Steps of the search, including the last one."""
        return max(len(self.tokens), *(step + 1 for step in self.finished.steps), 0)

    def hypothesis(self, number: int) -> list[int]:
        """The tokens of a finished hypothesis, exactly as the search found them, including a stop token."""
        steps, parents, tokens, _ = self.finished
        return [*self.beam(steps[number] - 1, parents[number]), tokens[number]]

    def beam(self, step: int, slot: int) -> list[int]:
        """The tokens of the beam in a slot after a step; none before the first step."""
        return [self.tokens[at][of] for at, of in self._way(step, slot)][::-1]

    def text(self, tokens: Sequence[int]) -> str:
        """The joined texts of single tokens; a character of several tokens shows as replacement characters."""
        return "".join(self.texts.get(token, f"<{token}>") for token in tokens)

    def row_blocks(self, step: int) -> list[list[tuple[int, int]]]:
        """By slot, the full KV blocks with generated tokens that its beam reads after a step; equal if it is shared.

        A block is full once the beams' newest token is its last. It belongs to the beam of that step, and to all beams
        that descend from it. Blocks with only prompt tokens, which all share, are left out.

        Returns:
            For each block, the step in which it became full, and the slot of the beam that it belonged to then.
        """
        return [[at for at in [*self._way(step, slot)][::-1] if self._fills(at[0])] for slot in self._slots(step)]

    def as_dict(self) -> dict[str, Any]:
        """The trace in JSON types, as in the field `trace` of a response."""
        return {**asdict(self), "finished": self.finished._asdict(), "texts": [*self.texts.items()]}

    def to_json(self) -> str:
        """The trace as JSON, for a file that `python -m vllm_trie.trace` draws."""
        return json.dumps(self.as_dict(), ensure_ascii=False, separators=(",", ":"))

    def _fills(self, step: int) -> bool:
        return (self.prompt_length + step + 1) % self.block_size == 0

    def _slots(self, step: int) -> range:
        return range(len(self.tokens[step]))

    def _way(self, step: int, slot: int) -> Iterator[tuple[int, int]]:
        """The (step, slot) pairs from a beam back to the first step."""
        for at in range(step, -1, -1):
            yield at, slot
            slot = self.parents[at][slot]


def trace_tokens_of(trace: Mapping[str, Any]) -> list[int]:
    """All tokens of beams, drafts and finished hypotheses in `as_dict`, each once, ascending."""
    drafted = [forest["tokens"] for forest in trace["forests"]]
    return sorted({*trace["finished"]["tokens"]}.union(*trace["tokens"], *drafted))


def _found_trace_fields(answer: Any) -> dict[str, Any] | None:
    """The fields of a trace in an answer, if it has one."""
    fields: Mapping[str, Any] = answer if isinstance(answer, Mapping) else vars(answer)
    extra = fields if isinstance(answer, Mapping) else {**fields, **(getattr(answer, "model_extra", None) or {})}
    if "returned" in extra:
        return dict(extra)
    found = extra.get("trace") or ((extra.get("kv_transfer_params") or {}).get(PLUGIN_NAME) or {}).get("trace")
    return None if found is None else dict(found)
