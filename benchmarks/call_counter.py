"""Counts calls of the package's functions: what a step costs the host, whatever machine it is."""

from __future__ import annotations

import cProfile
import pstats
from pathlib import Path

import vllm_trie

PACKAGE = str(Path(vllm_trie.__file__).parent)


class CallCounter(cProfile.Profile):
    """Counts, within it, calls of functions of the package; a comprehension, and each value of a generator, is one."""

    @property
    def num_calls(self) -> int:
        entries = pstats.Stats(self).stats.items()  # type: ignore[attr-defined]
        return sum(num_calls for (path, *_), (_, num_calls, *_) in entries if path.startswith(PACKAGE))
