"""Calls of `LLM.generate`: n beams, answered as arrays and as n outputs, compared with n sampled sequences."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import alternate, generate, stop
from benchmarks.gpu_engines import published
from benchmarks.gpu_engines.options import CACHED, COMPUTED, along_catalog, engine_options, prompts_of
from benchmarks.gpu_engines.published import NOTHING, Published

MOST_SECONDS = 5  # of a case and a kind of prompts, after the first round
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
ARRAYS, OUTPUTS, SAMPLING = "arrays", "n outputs", "sampling"
TITLE = "Beams compared with samples"
COLUMNS = ("case", "prompt", "answer", "ms", "tokens of rows per second", "times sampling", *published.COLUMNS)
NOTE = (
    "bfloat16, weights without content, CUDA graphs; catalogs: renormalised; "
    "prompt: computed for each call, or in the prefix cache; ms: a "
    "call of LLM.generate, the median, in turn with sampling: n requests of temperature 1 in place of n beams; of "
    "drafts hardly any is accepted, so they show what they cost; peers: ms, or requests per second, "
    f"next to computed prompts, as theirs are; {published.SOURCES}"
)


class Case(NamedTuple):
    """Searches at a time, on prompts of so many tokens, each of so many beams and tokens.

    Args:
        model: Of `SHAPES`.
        width: Beams of each.
        num_tokens: Of each hypothesis.
        prompt_length: In tokens.
        num_requests: At a time.
        is_along_catalog: Items of `num_tokens` tokens, or the open vocabulary.
        drafts: By n-grams.
        published: What peers have of it.
    """

    model: str
    width: int
    num_tokens: int
    prompt_length: int = 1000
    num_requests: int = 1
    is_along_catalog: bool = False
    drafts: bool = False
    published: Published = NOTHING

    @property
    def name(self) -> str:
        shape = f"{self.model}:{self.width}x{self.num_requests}:{self.num_tokens}@{self.prompt_length}"
        return shape + ":catalog" * self.is_along_catalog + ":drafts" * self.drafts

    @property
    def label(self) -> str:
        """As the table shows it."""
        shape = f"{self.width} beams x {self.num_requests}, {self.num_tokens} tokens after {self.prompt_length}"
        more = ", along a catalog" * self.is_along_catalog + ", drafts by n-grams" * self.drafts
        return f"{self.model}, {shape}{more}"

    @property
    def num_rows(self) -> int:
        return self.width * self.num_requests


RETRIEVAL = (
    *(Case("1.7B", 256, 3, is_along_catalog=along, published=published.ONE_OF_256) for along in (False, True)),
    *(Case("1.7B", 256, 3, 5000, 8, along, published=published.EIGHT_OF_256) for along in (False, True)),
    Case("1.7B", 50, 4, 2465, is_along_catalog=True, published=published.ONE_OF_50),
    Case("1.7B", 1000, 4, 2465, is_along_catalog=True, published=published.ONE_OF_1000),
)
WIDE = tuple(Case("0.6B", 5000, num_tokens, published=found) for num_tokens, found in published.OF_5000.items())
DRAFTS = (Case("0.6B", 4, 64, drafts=True),)
SMALL = (Case("tiny", 3, 4, 40), Case("tiny", 3, 3, 40, 2, is_along_catalog=True), Case("tiny", 3, 8, 40, drafts=True))


def steady(model: str) -> tuple[Case, ...]:
    """Longer answers of fewer beams, as chats and translations have them."""
    return (
        *(Case(model, width, 64) for width in (4, 16, 64)),
        Case(model, 512, 16),
        Case(model, 4, 64, num_requests=8),
        *(Case(model, width, 16, 4000) for width in (64, 128, 512)),
    )


@contextmanager
def running(cases: Sequence[Case], args: argparse.Namespace) -> Iterator[Any]:
    """An engine for cases that share one."""
    from vllm import LLM

    first = cases[0]
    with tempfile.TemporaryDirectory() as folder:
        options = engine_options(first.model, max(case.num_rows for case in cases), Path(folder), args)
        llm = LLM(folder, speculative_config=NGRAMS if first.drafts else None, **options)
        try:
            yield llm
        finally:
            stop(llm)


def runs_of(llm: Any, case: Case, kind: str) -> dict[str, Callable[[], Any]]:
    """By answer: a call with prompts of a kind; and one that samples, after prompts that are cached."""
    from vllm import SamplingParams

    from vllm_trie import beam_params

    prompts = prompts_of(case.name, kind, case.prompt_length, case.num_requests)
    common = {"max_tokens": case.num_tokens, "detokenize": False}
    options = along_catalog(case.num_tokens) if case.is_along_catalog else {"ignore_eos": True}
    options |= {"speculation": "exact"} if case.drafts else {}
    params = {
        ARRAYS: beam_params(case.width, compact=True, **common, **options),
        OUTPUTS: beam_params(case.width, n=case.width, **common, **options),
    }
    if kind == CACHED:
        params[SAMPLING] = SamplingParams(n=case.width, temperature=1.0, ignore_eos=True, **common)

    def run(own: Any) -> Any:
        return generate(llm, next(prompts), own)

    return {answer: partial(run, own) for answer, own in params.items()}


def rows(llm: Any, case: Case, args: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """Rows of `COLUMNS`."""
    for kind in (COMPUTED, CACHED):
        times = alternate(runs_of(llm, case, kind), args.repeats, MOST_SECONDS)
        seconds = {answer: statistics.median(own) for answer, own in times.items()}
        for answer in (ARRAYS, OUTPUTS):
            own = seconds[answer]
            speed = case.num_rows * case.num_tokens / own
            of_sampling = own / seconds[SAMPLING] if SAMPLING in seconds else "-"
            peers = case.published if kind == COMPUTED else NOTHING
            yield case.label, kind, answer, 1000 * own, speed, of_sampling, *peers
