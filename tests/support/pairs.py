"""Engines with a draft model, and searches that speculate or do not."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from allpairspy import AllPairs
from vllm import SamplingParams

from tests.support.engine import BLOCK_SIZE, ROOT, TRAINED_TARGET, Engine, Engines
from tests.support.reference import NEAR_TIE
from tests.support.running import MOST_TIES, Job, count_ties, prompt_of, run
from vllm_trie import beam_params
from vllm_trie.speculation.engine.adaptive_forests import AdaptiveForests
from vllm_trie.speculation.search.forest_size import PLAIN, ForestSize
from vllm_trie.supported_engines import plugin_config_of

TRAINED = (TRAINED_TARGET, ROOT / "benchmarks" / "stdlib_pair" / "draft")
NOISE = 0.012  # about half of the drafts of one beam are accepted

Pair = tuple[Path, Path]
Asked = tuple[list[int], dict[str, Any]]  # a prompt, and the options of a search

count_differing = partial(count_ties, tolerance=NEAR_TIE)


def drafting(draft: Path, num_layers: int, **more: Any) -> dict[str, Any]:
    """The option of an engine that drafts `num_layers` tokens."""
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": num_layers}
    return {"speculative_config": config | more}


def looking_up(num_layers: int, shortest: int = 1, longest: int = 3, **more: Any) -> dict[str, Any]:
    """The option of an engine that drafts `num_layers` tokens by n-grams."""
    config = {"method": "ngram", "num_speculative_tokens": num_layers, "prompt_lookup_min": shortest}
    return {"speculative_config": config | {"prompt_lookup_max": longest} | more}


def speculating(engines: Engines, pair: Pair, num_layers: int, **options: Any) -> Engine:
    """An engine with a draft model, that drafts `num_layers` tokens."""
    target, draft = pair
    return engines(target, **drafting(draft, num_layers), **options)


def searches(asked: Iterable[Asked], speculation: str | None = "exact") -> list[Job]:
    """The same searches, speculating or not."""
    jobs = []
    for prompt, options in asked:
        own = {name: value for name, value in options.items() if speculation != "off" or name != "draft_width"}
        own.setdefault("n", own["beam_width"])
        jobs.append((prompt, beam_params(**own, speculation=speculation)))
    return jobs


def steps_per_forward(output: Any) -> float:
    return output.kv_transfer_params["trie_beam"]["steps_per_forward"]


def check_exact(
    engine: Engine,
    asked: Sequence[Asked],
    after_step: Callable[[], None] = lambda: None,
    ordinary: Sequence[Job] = (),
    speculation: str = "exact",
) -> list[Any]:
    """Search in both ways, and compare all that comes back. Returns what speculation found.

    Args:
        ordinary: Ordinary requests, that must answer as they do alone.
        speculation: "exact" or "auto".
    """
    plain, alone = found_plainly(engine, searches(asked, "off")), found_plainly(engine, ordinary)
    outputs = run(engine, [*searches(asked, speculation), *ordinary], after_step)
    assert count_differing(outputs[len(asked) :], alone) == 0
    ties = count_differing(outputs[: len(asked)], plain)
    assert ties <= MOST_TIES * sum(len(output.outputs) for output in plain)
    return outputs[: len(asked)]


_found_before = dict[tuple[Any, ...], Any]()


def found_plainly(engine: Engine, jobs: Sequence[Job]) -> list[Any]:
    """What requests that do not speculate answer. How an engine drafts decides nothing of it, so that what another one
    with the same model has answered is not computed again.
    """
    vllm_config = engine.llm.llm_engine.vllm_config
    alike = (
        vllm_config.model_config.model,
        vllm_config.model_config.max_model_len,
        repr(plugin_config_of(vllm_config)),
    )
    keys = [(*alike, tuple(prompt), pickle.dumps(params)) for prompt, params in jobs]
    new = {key: job for key, job in zip(keys, jobs, strict=True) if key not in _found_before}
    _found_before.update(zip(new, run(engine, [*new.values()]), strict=True))
    return [_found_before[key] for key in keys]


ORDINARY = [
    (prompt_of(length, length), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0))
    for length in (5, BLOCK_SIZE - 1, 50)
]
WIDTHS = [1, 2, 4, 8]
DRAFTS_PER_BEAM = [1, 2, 4]
PROMPT_LENGTHS = [1, BLOCK_SIZE - 3, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 2, 2 * BLOCK_SIZE - 5]
GRID = [WIDTHS, DRAFTS_PER_BEAM, PROMPT_LENGTHS, [False, True]]


def grid(prompts: list[list[int]], max_tokens: int) -> list[Asked]:
    """Every pair of values of `GRID` at least once."""
    asked = []
    for (width, factor, length, ignore_eos), prompt in zip(AllPairs(GRID), prompts, strict=False):
        options = {"beam_width": width, "draft_width": factor * width, "ignore_eos": ignore_eos}
        asked.append((prompt[:length], options | {"max_tokens": max_tokens}))
    return asked


def sizes_in(monkeypatch: pytest.MonkeyPatch, *plan: ForestSize) -> list[int]:
    """Let forests be of these sizes, over and over. Returns the layers of those that were chosen, as they are."""
    chosen = list[int]()

    def choose(_: Any, forests: Any, length: int, most_layers: int, num_tokens: int) -> ForestSize:
        size = plan[len(chosen) % len(plan)]
        chosen.append(size.num_layers)
        if size == PLAIN:
            forests.rest(length, 2)
        return size._replace(num_layers=min(size.num_layers, most_layers))

    monkeypatch.setattr(AdaptiveForests, "choose", choose)
    return chosen
