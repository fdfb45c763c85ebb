"""Drafts of a model over plain beams: the toy pair, whose target is too small to gain until it is made deeper.

Its further layers add nothing to what the others compute (`benchmarks.models`), so the pair agrees as it did: an answer
costs more time of the target, and the share of drafts that it accepts stays.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from benchmarks import models
from benchmarks.beam_sampling import MODES, TEMPERATURE, Params, sampled_params
from benchmarks.common import TARGET, alternate, generate, stop
from benchmarks.gpu_engines.options import GRAPHS_ALONE, MEMORY_SHARE, folder_of
from benchmarks.gpu_engines.replies import check_hypotheses, outputs_of
from benchmarks.gpu_searches import DRAFT_MODEL, MAX_TOKENS, PROMPT_LENGTH, prompts

WIDTH, NUM_PROMPTS, MOST_SECONDS = 4, 8, 30
SAMPLED = MODES[f"beam sampling, {WIDTH}"]
TITLE = "Drafts of a model over plain beams"
COLUMNS = ("case", "ms without drafts", "ms with drafts", "runs", "times faster", "steps per forward")
NOTE = (
    "float16; compiled, with CUDA graphs of steps and, where these hold drafts, of their parts; without torch.compile "
    "steps with drafts have no graphs, others have; the toy pair, its target with further layers that change nothing; "
    f"{WIDTH} beams, {MAX_TOKENS} tokens after {PROMPT_LENGTH}; ms: of a search, one at a time, {NUM_PROMPTS} cached "
    f"prompts, in turn, medians of so many runs; sampled: at temperature {TEMPERATURE}, of the same distribution with "
    "drafts and without"
)


class Case(NamedTuple):
    """A search with drafts, and the one without.

    Args:
        way: Of `ways`.
        times: As deep as the toy's target.
    """

    way: str
    times: int = 16

    @property
    def name(self) -> str:
        return f"pair:{self.way}"


CASES, SMALL = (Case("exact"), Case("sampled")), (Case("exact", 2), Case("sampled", 2))


def _beams(speculation: str) -> Params:
    from vllm_trie import beam_params

    return lambda _: beam_params(WIDTH, max_tokens=MAX_TOKENS, ignore_eos=True, speculation=speculation)


def ways() -> dict[str, tuple[Params, Params]]:
    """By name: parameters without drafts and with them."""
    plain, drafted = (
        sampled_params(WIDTH, MAX_TOKENS, options) for options in (SAMPLED.plain_options, SAMPLED.options)
    )
    return {"exact": (_beams("off"), _beams("exact")), "sampled": (plain, drafted)}


@contextmanager
def running(cases: Sequence[Case], args: argparse.Namespace) -> Iterator[Any]:
    """An engine with drafts, and the target for cases that share its depth."""
    from vllm import LLM

    folder = models.make(models.deeper(cases[0].times), str(TARGET), folder_of(f"pair_{cases[0].times}"))
    llm = LLM(
        str(folder),
        dtype="float32" if args.rehearse else "float16",
        max_model_len=256,
        max_num_seqs=64,
        enforce_eager=args.rehearse,
        gpu_memory_utilization=MEMORY_SHARE,
        kv_cache_memory_bytes=1 << 30,
        compilation_config=GRAPHS_ALONE if args.no_compile else None,
        skip_tokenizer_init=True,
        speculative_config=DRAFT_MODEL,
        additional_config={"trie_beam": {}},
    )
    try:
        yield llm
    finally:
        stop(llm)


def rows(llm: Any, case: Case, args: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """A row of `COLUMNS`."""
    from benchmarks.watch import total_counts

    asked = prompts(2 if args.rehearse else NUM_PROMPTS)

    def search(params: Params) -> list[Any]:
        return [
            output
            for seed, tokens in enumerate(asked)
            for output in generate(llm, [{"prompt_token_ids": tokens}], params(seed))
        ]

    without, drafted = ways()[case.way]
    found = search(drafted)
    for output in (*found, *search(without)):
        check_hypotheses(outputs_of(output), 1, MAX_TOKENS)
    counts = total_counts(found)
    times = alternate(
        {"without": partial(search, without), "with": partial(search, drafted)}, args.repeats, MOST_SECONDS
    )
    plain, ours = (statistics.median(own) / len(asked) for own in times.values())
    num_runs = len(times["with"])
    label = f"{case.way}, a target {models.deeper(case.times)}"
    yield label, 1000 * plain, 1000 * ours, num_runs, plain / ours, counts.steps_per_forward
