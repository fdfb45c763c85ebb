"""How good an answer is, from 0 to 1, as the papers' task sets judge it; programs are run by `benchmarks.sandbox`."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
ARTICLE = re.compile(r"\b(?:a|an|the)\b")
NO_WORD = re.compile(r"[^a-z0-9]+")


def number_of(answer: str) -> float | None:
    """The first number after the last ####, or else the last one of all: as in GSM8K."""
    _, mark, behind = answer.rpartition("####")
    found = NUMBER.findall(behind if mark else answer)
    return float(found[0 if mark else -1].replace(",", "")) if found else None


def boxed(answer: str) -> str | None:
    r"""What stands in the last \boxed{}, without spaces, or None: as in MATH."""
    _, mark, behind = answer.rpartition(r"\boxed{")
    depth = 1
    for end, character in enumerate(behind):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return "".join(behind[:end].split()) if mark else None
    return None


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 if the answer is one of the references, but for case, punctuation, articles and spaces.

    Source: the official script of SQuAD 1.1.
    """
    return float(_plain(answer) in map(_plain, references))


def _plain(text: str) -> str:
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(ARTICLE.sub(" ", text).split())


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L: the F1 of the longest common subsequence of words, in lower case, without stemming.

    Source: Lin 2004, as `rouge_score` computes rougeL.
    """
    own, theirs = _words(answer), _words(reference)
    common = _longest_common(own, theirs)
    return 2 * common / (len(own) + len(theirs)) if common else 0.0


def _words(text: str) -> list[str]:
    return NO_WORD.sub(" ", text.lower()).split()


def _longest_common(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0
        for at, another in enumerate(other, start=1):
            diagonal, row[at] = row[at], diagonal + 1 if word == another else max(row[at], row[at - 1])
    return row[-1]
