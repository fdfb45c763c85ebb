"""Calls of `LLM.generate`: n beams, answered as arrays and as n outputs, compared with n sampled sequences."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from benchmarks.common import alternate, generate, stop, timed
from benchmarks.gpu_engines import published
from benchmarks.gpu_engines.options import CACHED, COMPUTED, along_catalog, engine_options, folder_of, prompts_of
from benchmarks.gpu_engines.published import NOTHING, Published
from benchmarks.gpu_engines.replies import arrays_of, check_cached, check_hypotheses, outputs_of

MOST_SECONDS = 5  # of a case and a kind of prompts, after the first round
MOST_SAMPLES = 2048  # that are sampled in turn; more take seconds, and are sampled once
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
ARRAYS, OUTPUTS, SAMPLING = "arrays", "n outputs", "sampling"
TITLE = "Beams compared with samples"
COLUMNS = ("case", "prompt", "answer", "ms", "runs", "tokens of rows per second", "times sampling", *published.COLUMNS)
NOTE = (
    "bfloat16, weights without content, CUDA graphs; catalogs: renormalised; "
    "prompt: computed for each call, or in the prefix cache; ms: a "
    "call of LLM.generate, the median of so many runs, in turn with sampling: n requests of temperature 1 in place of "
    f"n beams, of more than {MOST_SAMPLES:,} once; of "
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
SMALL = (Case("tiny", 3, 4, 70), Case("tiny", 3, 3, 70, 2, is_along_catalog=True), Case("tiny", 3, 8, 70, drafts=True))


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
    folder = folder_of(first.model)
    options = engine_options(first.model, max(case.num_rows for case in cases), folder, args)
    llm = LLM(str(folder), speculative_config=NGRAMS if first.drafts else None, **options)
    try:
        yield llm
    finally:
        stop(llm)


def params_of(case: Case, kind: str) -> dict[str, Any]:
    """By answer: parameters of a search; and those of sampling, after prompts that are cached."""
    from vllm import SamplingParams

    from vllm_trie import beam_params

    common = {"max_tokens": case.num_tokens, "detokenize": False}
    options = along_catalog(case.num_tokens) if case.is_along_catalog else {"ignore_eos": True}
    options |= {"speculation": "exact"} if case.drafts else {}
    params = {
        ARRAYS: beam_params(case.width, compact=True, **common, **options),
        OUTPUTS: beam_params(case.width, n=case.width, **common, **options),
    }
    if kind == CACHED:
        params[SAMPLING] = SamplingParams(n=case.width, temperature=1.0, ignore_eos=True, **common)
    return params


def timed_replies(
    llm: Any, case: Case, kind: str, args: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[Any]]]:
    """By answer: seconds of calls with prompts of a kind, and the last call's outputs."""
    replies, params = dict[str, list[Any]](), params_of(case, kind)
    prompts = prompts_of(case.name, kind, case.prompt_length, case.num_requests)
    asked = iter([*islice(prompts, (2 + args.repeats) * len(params))])  # made before any is timed

    def run(answer: str) -> object:
        replies[answer] = generate(llm, next(asked), params[answer])
        return replies[answer]

    runs: dict[str, Callable[[], object]] = {answer: partial(run, answer) for answer in params}
    is_once = SAMPLING in runs and case.num_rows > MOST_SAMPLES
    once = {SAMPLING: runs.pop(SAMPLING)} if is_once else {}
    times = alternate(runs, args.repeats, MOST_SECONDS)
    for answer, call in once.items():
        few = params[answer].clone()
        few.n = 1
        generate(llm, next(asked), few)  # warms up
        times[answer] = [timed(call)]
    return times, replies


def check_replies(replies: dict[str, list[Any]], case: Case, kind: str) -> None:
    """Raise RuntimeError unless they are those of this case's searches."""
    for answer in (ARRAYS, OUTPUTS):
        for output in replies[answer]:
            found = arrays_of(output.kv_transfer_params) if answer == ARRAYS else outputs_of(output)
            check_hypotheses(found, case.width, case.num_tokens)
            check_cached(output.num_cached_tokens, kind, case.prompt_length)


def rows(llm: Any, case: Case, args: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """Rows of `COLUMNS`."""
    for kind in (COMPUTED, CACHED):
        times, replies = timed_replies(llm, case, kind, args)
        check_replies(replies, case, kind)
        seconds = {answer: statistics.median(own) for answer, own in times.items()}
        for answer in (ARRAYS, OUTPUTS):
            own = seconds[answer]
            speed = case.num_rows * case.num_tokens / own
            of_sampling = own / seconds[SAMPLING] if SAMPLING in seconds else "-"
            peers = case.published if kind == COMPUTED else NOTHING
            yield case.label, kind, answer, 1000 * own, len(times[answer]), speed, of_sampling, *peers
