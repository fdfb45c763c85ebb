"""examples/transcribe samples doubtful parts of a recording again, as faster-whisper does, and knows silence."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engine import ROOT

SCRIPT = runpy.run_path(str(ROOT / "examples" / "transcribe" / "transcribe.py"))
TEMPERATURES = SCRIPT["TEMPERATURES"]
SUPPRESSED = [5, 7]
SURE, UNSURE = -0.5, -1.5  # per token
AGAIN = "and again " * 20


class Heard(SimpleNamespace):
    """A hypothesis of four tokens."""

    def __init__(self, text: str, logprob: float = SURE) -> None:
        super().__init__(text=text, token_ids=[1, 2, 3, 4], cumulative_logprob=4 * logprob)


class ScriptedLLM:
    """Answers each part by its attempts, one after the other; a prompt is the number of a part."""

    def __init__(self, *attempts: Sequence[list[Heard]]) -> None:
        self.model_config = SimpleNamespace(try_get_generation_config=lambda: {"suppress_tokens": SUPPRESSED})
        self.asked: list[tuple[list[int], Any]] = []
        self._left = [iter(of_part) for of_part in attempts]

    def generate(self, prompts: list[int], params: Any, use_tqdm: bool = True) -> list[SimpleNamespace]:
        self.asked.append((prompts, params))
        return [SimpleNamespace(outputs=next(self._left[part])) for part in prompts]


def transcribed(llm: ScriptedLLM, *quiet: float) -> list[list[str]]:
    found = SCRIPT["transcribed"](llm, [*range(len(quiet))], 2, list(quiet))
    return [[hypothesis.text for hypothesis in hypotheses] for hypotheses in found]


def test_a_search_that_is_sure_is_the_answer() -> None:
    llm = ScriptedLLM([[Heard("one"), Heard("won", UNSURE)]], [[Heard("two")]])
    assert transcribed(llm, 0.9, 0.0) == [["one", "won"], ["two"]]
    ((_, params),) = llm.asked
    assert params.n == 2


@pytest.mark.parametrize("doubtful", [Heard("one", UNSURE), Heard(AGAIN)], ids=["improbable", "repeats itself"])
def test_doubtful_parts_alone_are_sampled_until_they_pass(doubtful: Heard) -> None:
    samples = [Heard("won", -0.9), Heard("one", -0.8), Heard("won", -0.9)]
    llm = ScriptedLLM([[doubtful], [doubtful], samples], [[Heard("two")]])
    assert transcribed(llm, 0.0, 0.0) == [["one", "won"], ["two"]]
    (_, *sampled) = llm.asked
    assert [parts for parts, _ in sampled] == [[0], [0]]
    assert [params.temperature for _, params in sampled] == list(TEMPERATURES[:2])
    for _, params in sampled:
        assert {*params.logit_bias} == {*SUPPRESSED}
        assert params.min_tokens == 1


def test_if_no_attempt_passes_the_likeliest_that_does_not_repeat_itself_counts() -> None:
    attempts = [[Heard(text, logprob)] for text, logprob in zip("abcdef", (-3, -2, -1.5, -4, -2.5, -5), strict=True)]
    assert transcribed(ScriptedLLM([*attempts[:5], [Heard(AGAIN)]]), 0.0) == [["c"]]
    repeated = [[Heard(AGAIN + str(number), -number)] for number in (5, 4, 1, 2, 3, 6)]
    assert transcribed(ScriptedLLM(repeated), 0.0) == [[AGAIN + "1"]]


def test_a_part_in_which_nobody_speaks_is_not_sampled() -> None:
    llm = ScriptedLLM([[Heard("dots", UNSURE)]], [[Heard("quiet speech")]])
    assert transcribed(llm, 0.7, 0.7) == [["dots"], ["quiet speech"]]
    assert len(llm.asked) == 1
    assert SCRIPT["is_silence"](Heard("dots", UNSURE), 0.7)
    assert not SCRIPT["is_silence"](Heard("quiet speech"), 0.7)
    assert not SCRIPT["is_silence"](Heard("speech", UNSURE), 0.5)
