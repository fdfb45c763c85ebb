"""What two checkouts are compared on: the repository's pair of models, on real code prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, product
from typing import Any, NamedTuple

from benchmarks.common import TARGET
from benchmarks.prompts import CODE

OLDER, NEWER, STOCK, PAPER = "older", "newer", "stock vLLM", "trie paper's"
AGAIN = ", again"
BEAMS = ((4, 1, 64), (8, 1, 64), (16, 1, 64), (128, 1, 24), (8, 8, 24), (16, 32, 12))  # of each prompt; prompts; tokens
ANSWER_WIDTHS, ANSWER_TOKENS = (256, 2048), 3
HOST_BEAMS = ((4, 1, 64), (4, 8, 48), (16, 1, 64), (16, 8, 48), (128, 1, 24))  # as `BEAMS`
ROWS, ROW_TOKENS = (8, 64), 48
PAPER_WIDTHS, PAPER_PROMPTS, PAPER_TOKENS = (1, 3, 6, 9, 15), 2, 24
DEPTHS, COST_WIDTH, COST_DRAFTS, COST_LAYERS, COST_PROMPTS, COST_TOKENS = (16, 4, 1), 4, 8, 4, 2, 32
CATALOG_WIDTHS, CATALOG_ITEMS, CATALOG_TOKENS, CATALOG_PROMPTS = (8, 64), 700, 8, 8
GRAMMAR_BEAMS, GRAMMAR_TOKENS = ((4, 1), (4, 8), (16, 1)), 32  # of each prompt; prompts
ASSIGNMENTS = r"([a-z_]{1,12} = [a-z_0-9.]{1,20}\n)+"
STEPS_LAYERS, STEPS_WIDTHS, STEPS_FACTORS, STEPS_TOKENS = (4, 2), (1, 2, 4, 8), (1, 2, 4), 64


class Case(NamedTuple):
    """What several sides run.

    Args:
        name: As tables show it.
        batches: Of prompts, one after the other.
        options: Of `beam_params`; of `SamplingParams` where there is no width.
        depth: Of the target, times that of the trained one; 0: it computes nothing, and its logits are ready.
        layers: Of drafts; None: no draft model.
    """

    name: str
    batches: list[list[list[int]]]
    options: dict[str, Any]
    depth: int = 1
    layers: int | None = None


def beam_cases() -> Iterator[Case]:
    for width, count, num_tokens in BEAMS:
        yield Case(f"{count} x {width} beams", [prompts(count)], beams(width, num_tokens))


def host_cases() -> Iterator[Case]:
    for width, count, num_tokens in HOST_BEAMS:
        yield Case(f"{count} x {width} beams", [prompts(count)], beams(width, num_tokens), depth=0)


def answer_cases() -> Iterator[Case]:
    for width in ANSWER_WIDTHS:
        options = beams(width, ANSWER_TOKENS) | {"n": width}
        name = f"{width} outputs of {ANSWER_TOKENS} tokens"
        yield Case(name, [prompts(1)], options)
        yield Case(f"{name}, of a model that computes nothing", [prompts(1)], options, depth=0)


def ordinary_cases() -> Iterator[Case]:
    for rows, temperature in product(ROWS, (0.0, 1.0)):
        options = {"temperature": temperature, "max_tokens": ROW_TOKENS, "ignore_eos": True}
        yield Case(f"{rows} rows, temperature {temperature:.0f}", [prompts(rows)], options)


def paper_cases() -> Iterator[Case]:
    for width in PAPER_WIDTHS:
        yield Case(f"{width} beams", one_by_one(PAPER_PROMPTS), beams(width, PAPER_TOKENS) | {"n": width})


def catalog_cases() -> Iterator[Case]:
    text = list(chain.from_iterable(prompts(CATALOG_PROMPTS)))
    items = [text[start : start + CATALOG_TOKENS] for start in range(CATALOG_ITEMS)]
    for width in CATALOG_WIDTHS:
        options = beams(width, CATALOG_TOKENS) | {"allowed_sequences": items}
        yield Case(f"{width} beams", [prompts(CATALOG_PROMPTS)], options)


def grammar_cases() -> Iterator[Case]:
    for width, count in GRAMMAR_BEAMS:
        options = {"beam_width": width, "max_tokens": GRAMMAR_TOKENS, "structured_outputs": {"regex": ASSIGNMENTS}}
        yield Case(f"{count} x {width} beams", [prompts(count)], options)


def dsbd_cases() -> Iterator[Case]:
    options = beams(COST_WIDTH, COST_TOKENS) | {"speculation": "exact", "draft_width": COST_DRAFTS}
    for depth in DEPTHS:
        yield Case(f"target {depth}x as deep", one_by_one(COST_PROMPTS), options, depth, COST_LAYERS)


def steps_cases(num_prompts: int) -> Iterator[Case]:
    """The cells of RESULTS.md's steps per forward."""
    for layers, width, factor in product(STEPS_LAYERS, STEPS_WIDTHS, STEPS_FACTORS):
        options = {"speculation": "exact", "draft_width": factor * width, "max_tokens": STEPS_TOKENS}
        name = f"{width} beams, {factor * width} drafts x {layers} layers"
        yield Case(name, one_by_one(num_prompts), {"beam_width": width, **options}, layers=layers)


def beams(width: int, num_tokens: int) -> dict[str, Any]:
    return {"beam_width": width, "max_tokens": num_tokens, "ignore_eos": True}


def prompts(count: int) -> list[list[int]]:
    return CODE.tokens(str(TARGET), count)


def one_by_one(count: int) -> list[list[list[int]]]:
    return [[prompt] for prompt in prompts(count)]


class Section(NamedTuple):
    """Cases, who runs them, and what of each is timed."""

    title: str
    sides: tuple[str, ...]  # ratios are to the first
    cases: Callable[[], Iterator[Case]]
    is_by_step: bool  # while decoding; otherwise all of it, by token of one answer to each prompt


SECTIONS = {
    "beams": Section("Beams, ms per step", (OLDER, OLDER + AGAIN, NEWER), beam_cases, True),
    "host": Section(
        "Beams of a model that computes nothing, ms per step", (OLDER, OLDER + AGAIN, NEWER), host_cases, True
    ),
    "answers": Section("Beams as outputs, ms per token", (OLDER, OLDER + AGAIN, NEWER), answer_cases, False),
    "ordinary": Section("No beams, ms per step", (STOCK, STOCK + AGAIN, NEWER), ordinary_cases, True),
    "paper": Section("One prompt at a time, ms per token", (PAPER, PAPER + AGAIN, OLDER, NEWER), paper_cases, False),
    "catalogs": Section("Along a catalog, ms per token", (OLDER, OLDER + AGAIN, NEWER), catalog_cases, False),
    "grammars": Section("Under a grammar, ms per step", (OLDER, OLDER + AGAIN, NEWER), grammar_cases, True),
    "dsbd": Section("Speculation, ms per token", (OLDER, OLDER + AGAIN, NEWER), dsbd_cases, False),
}
