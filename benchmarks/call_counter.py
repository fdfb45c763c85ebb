"""Counts calls of the package's functions: what a step costs the host, whatever machine it is. By Python 3.11."""

from __future__ import annotations

import cProfile
import pstats
from pathlib import Path

import vllm_trie

PACKAGE = str(Path(vllm_trie.__file__).parent / "") + "/"


class CallCounter(cProfile.Profile):
    """Counts, within it, calls of functions of the package.

    A comprehension, and each value of a generator, is one: from Python 3.12 on comprehensions are none.
    """

    @property
    def num_calls(self) -> int:
        entries = pstats.Stats(self).stats.items()  # type: ignore[attr-defined]
        return sum(num_calls for (path, *_), (_, num_calls, *_) in entries if path.startswith(PACKAGE))
