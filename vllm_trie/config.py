"""Engine-wide options, from `additional_config={"trie_beam": {...}}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from vllm_trie.params import SEMANTICS
from vllm_trie.speculation_options import SpeculationOptions, check_options

PLUGIN_NAME = "trie_beam"


@dataclass(frozen=True)
class TrieBeamConfig(SpeculationOptions):
    """Engine-wide options.

    Those of `SpeculationOptions` are for requests that say nothing of them, as far as they apply to what these ask for.

    Args:
        reclaim_interval: Steps between two returns of a group's dead blocks to vLLM's pool. They go
            back earlier when free blocks run low, and in any case when the group ends.
        max_beam_width: The widest search a request may ask for; max_num_seqs limits it in any case.
        semantics: What requests get that name no semantics, see `BeamParams`.
        check_invariants: Check every trie after every step; for tests and bug reports, slow.
        debug_rank_check: Let tensor parallel ranks compare what they decide in every step, and end the engine if they
            differ; for tests and bug reports, slow.
        vllm_check: What a vLLM that differs from the recorded one leads to: "strict", to a refusal; "warn", to a
            warning where what differs may still fit; "off", to nothing. None: what VLLM_TRIE_CHECK says, else "warn".
    """

    reclaim_interval: int = 15
    max_beam_width: int | None = None
    semantics: str = "hf"
    check_invariants: bool = False
    debug_rank_check: bool = False
    vllm_check: str | None = None

    def __post_init__(self) -> None:
        interval = self.reclaim_interval
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(f"trie_beam.reclaim_interval={interval!r} is not a number of steps; pass an integer >= 1")
        widest = self.max_beam_width
        if widest is not None and (isinstance(widest, bool) or not isinstance(widest, int) or widest < 1):
            raise ValueError(f"trie_beam.max_beam_width={widest!r} is not a number of beams; pass an integer >= 1")
        if self.semantics not in SEMANTICS:
            known = ", ".join(map(repr, SEMANTICS))
            raise ValueError(f"trie_beam.semantics={self.semantics!r} is unknown; known: {known}")
        for name in ("check_invariants", "debug_rank_check"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"trie_beam.{name}={value!r} is neither true nor false")
        check_options(self, "trie_beam.")

    @classmethod
    def from_additional_config(cls, additional_config: Mapping[str, Any] | None) -> TrieBeamConfig:
        """Parse `additional_config["trie_beam"]`.

        Raises:
            ValueError: an unknown option, or a value out of range.
        """
        options = (additional_config or {}).get(PLUGIN_NAME, {})
        if not isinstance(options, Mapping):
            raise ValueError(f'additional_config["{PLUGIN_NAME}"]={options!r} is not a mapping of options; pass {{}}')
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                meant = get_close_matches(str(name), known, n=1)
                hint = f"did you mean {meant[0]}?" if meant else f"known: {', '.join(known)}"
                raise ValueError(f"unknown option {PLUGIN_NAME}.{name}; {hint}")
        return cls(**options)
