"""Search by steps: forked from held KV blocks, against resubmission over vLLM's prefix cache, and without one."""

from __future__ import annotations

import statistics
import zlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from benchmarks.common import alternate, generate
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.significance import paired
from vllm_trie import StepCandidate, beam_params
from vllm_trie.engine.kv_cache import BeamKVCacheManager

FORKED, CACHED, RECOMPUTED = "forked", "cached", "recomputed"


def cells(setting: Setting) -> list[Cell]:
    """Prompts, tokens of each, beams, candidates per beam."""
    if setting.size == "minimal":
        return [(1, 32, 2, 2)]
    quick = [(2, 64, 4, 4), (2, 512, 4, 4), (1, 512, 4, 16)]
    return setting.pick([], quick, [*quick, (8, 512, 4, 4), (1, 512, 8, 32)])


def score(candidates: list[StepCandidate]) -> list[float]:
    """A number that costs nothing, and depends on the text alone."""
    return [zlib.crc32(candidate.text.encode()) / 2**32 for candidate in candidates]


def measure(bench: Bench, num_prompts: int, num_tokens: int, width: int, candidates: int) -> Measured:
    """The same searches by the same seed, alternating."""
    llm = bench.engine()
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in bench.prompts(num_prompts, num_tokens)]
    longest = bench.setting.max_tokens or bench.setting.pick(24, 64, 128)
    given = {"n": width, "candidates": candidates, "step_stop": ["\n"], "scorer": score}
    given |= {"max_tokens": longest, "seed": 0, "ignore_eos": True}
    answers: dict[str, Any] = {}

    def search(how: str) -> None:
        held: AbstractContextManager[Any] = nullcontext()
        if how != FORKED:
            held = patch.object(BeamKVCacheManager, "_holds", return_value=False)
        with held:
            params = beam_params(width, unit="step", skip_reading_prefix_cache=how == RECOMPUTED, **given)
            outputs = generate(llm, prompts, params)
        rounds = [output.kv_transfer_params["trie_beam"]["num_rounds"] for output in outputs]
        answers[how] = rounds, [[o.text for o in output.outputs] for output in outputs]

    runs = {how: lambda how=how: search(how) for how in (FORKED, CACHED, RECOMPUTED)}
    seconds = alternate(runs, bench.setting.pick(1, 3, 9))
    medians = [statistics.median(seconds[how]) for how in runs]
    times = [str(paired(seconds[how], seconds[FORKED]).ratio) for how in (CACHED, RECOMPUTED)]
    (rounds, ours), *theirs = (answers[how] for how in runs)
    same = [sum(a == b for a, b in zip(ours, texts, strict=True)) for _, texts in theirs]
    sizes = num_prompts, num_tokens, width, candidates, statistics.mean(rounds)
    return Measured([(*sizes, *medians, *times, f"{min(same)} of {num_prompts}")])


TABLE = Table(
    "Search by steps",
    (
        *("prompts", "tokens of each", "beams", "candidates per beam", "rounds", "forked, s", "prefix cache, s"),
        *("no cache, s", "prefix cache, times forked (95 %)", "no cache, times (95 %)", "same answers"),
    ),
    cells,
    measure,
    "forked: candidates go on with the KV blocks of what they continue; prefix cache, no cache: the same requests "
    "without that, as a client resubmits them; one scorer, which costs nothing; one seed; steps are lines; alternating",
)
