"""What `trace=True` returns, and how one walks it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

PLUGIN_NAME = "trie_beam"  # that of `options`, which needs what a reader of traces may lack


class Finished(NamedTuple):
    """Hypotheses that finished, in the order in which they did: [F] each."""

    steps: list[int]  # of their last tokens
    parents: list[int]  # the slots, one step before, that they continue
    tokens: list[int]  # their last ones, stop tokens among them
    scores: list[float]  # cumulative log-probabilities, in nats


@dataclass(frozen=True)
class Forest:
    """The drafts of one forward: [D] each.

    Args:
        step: The first of the steps that the forward took: first drafts lie beside the beams of this step, the drafts
            after them beside those of the next one.
        parents: The draft that each continues, or -1 - slot: the beam in that slot before `step`.
        tokens: Of each.
    """

    step: int
    parents: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Trace:
    """One search. Steps count from 0, one token each; slots, the places of beams, too.

    Args:
        prompt_length: In tokens.
        block_size: Tokens of a KV block.
        parents: [S][b] the slot that the beam in each slot continues, one step before; in the first step 0, the prompt.
        tokens: [S][b] its newest token.
        scores: [S][b] its cumulative log-probability in nats, to five digits behind the point; None: no beam is there.
        finished: The hypotheses that finished. What finishes in the last step of all has no beams beside it.
        returned: [n] the numbers, in `finished`, of the hypotheses that came back, best first.
        forests: Of a search that speculates, one for each forward that verified drafts.
        accepted: [S][b] the draft of the step's forward that each beam is, -1 where it was not drafted; [] where a step
            accepts no drafts. The beams of a forward's last step need none.
        blocks: [S] how many KV blocks all beams together hold, and how many of these, the first ones, they all share,
            once the step is done; None between the steps of a forward, in the first step and without KV blocks.
        texts: By token. Without a tokenizer there are none.
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
            answer: A `RequestOutput` of vLLM, a response of a server, as an object or as its JSON, or `as_dict`.

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
        """Steps of the search, the one in which all ended among them."""
        return max(len(self.tokens), *(step + 1 for step in self.finished.steps), 0)

    def hypothesis(self, number: int) -> list[int]:
        """The tokens of a finished hypothesis, exactly those that the search found, the stop token included."""
        steps, parents, tokens, _ = self.finished
        return [*self.beam(steps[number] - 1, parents[number]), tokens[number]]

    def beam(self, step: int, slot: int) -> list[int]:
        """The tokens of the beam that is in a slot after a step; none before the first one."""
        return [self.tokens[at][of] for at, of in self._way(step, slot)][::-1]

    def text(self, tokens: Sequence[int]) -> str:
        """The texts of tokens, each by itself: of a character that several tokens make it shows replacements."""
        return "".join(self.texts.get(token, f"<{token}>") for token in tokens)

    def row_blocks(self, step: int) -> list[list[tuple[int, int]]]:
        """By slot, the full KV blocks of generated tokens that its beam reads after a step: equal where it is the same.

        A block is full once the beams' newest token is its last. It belongs to the beam of that step, and to all beams
        that descend from it. Blocks of the prompt alone, which all share, are left out.

        Returns:
            Of each block the step in which it became full, and the slot of the beam to which it belonged then.
        """
        return [[at for at in [*self._way(step, slot)][::-1] if self._fills(at[0])] for slot in self._slots(step)]

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it: what the field `trace` of a response is."""
        return {**asdict(self), "finished": self.finished._asdict(), "texts": [*self.texts.items()]}

    def to_json(self) -> str:
        """For a file that `python -m vllm_trie.trace` draws."""
        return json.dumps(self.as_dict(), ensure_ascii=False, separators=(",", ":"))

    def _fills(self, step: int) -> bool:
        return (self.prompt_length + step + 1) % self.block_size == 0

    def _slots(self, step: int) -> range:
        return range(len(self.tokens[step]))

    def _way(self, step: int, slot: int) -> Iterator[tuple[int, int]]:
        """From a beam back to the first step."""
        for at in range(step, -1, -1):
            yield at, slot
            slot = self.parents[at][slot]


def trace_tokens_of(trace: Mapping[str, Any]) -> list[int]:
    """All tokens of beams, drafts and finished hypotheses in `as_dict`, each once, ascending."""
    drafted = [forest["tokens"] for forest in trace["forests"]]
    return sorted({*trace["finished"]["tokens"]}.union(*trace["tokens"], *drafted))


def _found_trace_fields(answer: Any) -> dict[str, Any] | None:
    """The lists, wherever an answer has them."""
    fields: Mapping[str, Any] = answer if isinstance(answer, Mapping) else vars(answer)
    extra = fields if isinstance(answer, Mapping) else {**fields, **(getattr(answer, "model_extra", None) or {})}
    if "returned" in extra:
        return dict(extra)
    found = extra.get("trace") or ((extra.get("kv_transfer_params") or {}).get(PLUGIN_NAME) or {}).get("trace")
    return None if found is None else dict(found)
