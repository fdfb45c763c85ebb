"""Generative retrieval: wide beams along a catalog of items, each a few tokens, after a long prompt.

The catalog is synthetic unless `--catalog` names one: items of `NUM_LEVELS` tokens, each level with tokens of its own,
as semantic ids have them, sampled by a seeded generator.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import models
from benchmarks.common import alternate, generate, median_ratio, timed
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.tables.throughput import CLIENT_LOOP, OURS, SAMPLING, TRANSFORMERS
from benchmarks.watch import clocked, runner_of
from vllm_trie import beam_params, hypotheses
from vllm_trie.catalog import Catalog
from vllm_trie.catalog.items import CatalogItems
from vllm_trie.entrypoints.llm import llm_beam_search
from vllm_trie.options.item_ids import MOST_EXCLUDED

NUM_LEVELS, SEED, FIRST_CODE = 4, 0, 2
PROMPT_TOKENS = 1000
MOST_CLIENT_ROWS = MOST_TRANSFORMERS_ROWS = 128  # beyond them a search takes minutes


def synthetic(num_items: int, vocab_size: int) -> np.ndarray:
    """[items, levels] int32, different ones."""
    codes, random = (vocab_size - FIRST_CODE) // NUM_LEVELS, np.random.default_rng(SEED)
    codes = min(codes, 4096)
    numbers = random.permutation(np.unique(random.integers(0, codes**NUM_LEVELS, num_items + num_items // 8 + 8)))
    levels = numbers[:num_items, None] // codes ** np.arange(NUM_LEVELS) % codes
    return (levels + FIRST_CODE + codes * np.arange(NUM_LEVELS)).astype(np.int32)


def catalog_of(bench: Bench, variant: str, num_items: int) -> str:
    """The file of a catalog for a model."""
    if bench.setting.catalog is not None:
        return bench.setting.catalog
    return bench.file(f"{variant} {num_items}.catalog", lambda path: _write(path, bench.model(variant), num_items))


def _write(path: Path, model: str, num_items: int) -> None:
    from transformers import AutoConfig

    vocab_size = AutoConfig.from_pretrained(model).get_text_config().vocab_size
    rows = synthetic(num_items, vocab_size)
    lengths = np.full(num_items, NUM_LEVELS, np.int32)
    Catalog.from_items(CatalogItems(rows.ravel(), lengths, np.arange(num_items)), vocab_size, None).save(path)


def engine_of(bench: Bench, variant: str, widest: int, sizes: Sequence[int]) -> Any:
    """An engine with catalogs of these many items, by their number."""
    catalogs = {str(size): catalog_of(bench, variant, size) for size in sizes}
    limits = {"max_num_seqs": widest, "max_num_batched_tokens": max(8192, widest), "max_logprobs": 2 * MOST_CLIENT_ROWS}
    return bench.engine(variant, additional_config={"trie_beam": {"catalogs": catalogs}}, **limits)


def variants(setting: Setting) -> tuple[str, ...]:
    """The model itself, and besides the toy a larger one."""
    return (models.AS_IT_IS, models.RANDOM_60M) if setting.is_toy else (models.AS_IT_IS,)


def is_itself(variant: str) -> bool:
    """Whether it is the model, not a larger one."""
    return variant == models.AS_IT_IS


# A step with catalogs of several sizes.


def size_cells(setting: Setting) -> list[Cell]:
    sizes = setting.pick((10**3,), (10**3, 10**5, 10**6), (10**3, 10**5, 10**7))
    return [(variant, setting.pick(16, 128, 128), list(sizes)) for variant in variants(setting)]


def measure_sizes(bench: Bench, variant: str, width: int, sizes: list[int]) -> Measured:
    """Searches on a prompt that is cached, in turn: without a catalog, and along each of them."""
    llm = engine_of(bench, variant, max(width, 512), sizes)
    prompts = [{"prompt_token_ids": prompt} for prompt in bench.prompts(1, PROMPT_TOKENS)]
    free = beam_params(width, max_tokens=NUM_LEVELS, ignore_eos=True)
    runs: dict[str, Callable[[], object]] = {"none": partial(generate, llm, prompts, free)}
    for size in map(str, sizes):
        runs[size] = partial(generate, llm, prompts, beam_params(width, max_tokens=NUM_LEVELS, catalog=size))
    excluded = list(range(min(sizes[-1] // 10, MOST_EXCLUDED)))  # ids of items anywhere
    without = beam_params(width, max_tokens=NUM_LEVELS, catalog=str(sizes[-1]), exclude_items=excluded)
    runs[f"{sizes[-1]} but {len(excluded)}"] = partial(generate, llm, prompts, without)
    seconds = alternate(runs, bench.setting.pick(2, 7, 15))
    of_step = {name: 1000 * statistics.median(own) / NUM_LEVELS for name, own in seconds.items()}
    rows = [(variant, width, name, of_step[name], median_ratio(own, seconds["none"])) for name, own in seconds.items()]
    return Measured(rows)


SIZES = Table(
    "A step along a catalog",
    ("model", "beams", "items", "ms per step", "times without a catalog"),
    size_cells,
    measure_sizes,
    f"a search of {NUM_LEVELS} tokens on a cached prompt of {PROMPT_TOKENS}, whole call over its steps, in turn; "
    "times: medians of ratios; but: so many are excluded, which are part of the request",
)

# Whole searches against peers.


def cells(setting: Setting) -> list[Cell]:
    widths = setting.widths or setting.pick((16,), (128, 512), (128, 512, 2048, 5000))
    return [(variant, width) for variant in variants(setting) for width in widths if width < 5000 or is_itself(variant)]


def along(catalog: Catalog, prompt_length: int) -> Callable[[int, Any], list[int]]:
    """transformers' `prefix_allowed_tokens_fn`."""
    first_child, tokens = catalog.first_child, catalog.tokens

    def allowed(_: int, ids: Any) -> list[int]:
        node = 0
        for token in ids[prompt_length:].tolist():
            start, end = int(first_child[node]), int(first_child[node + 1])
            node = start + int(np.searchsorted(tokens[start:end], token))
            if node >= end or tokens[node] != token:
                return [0]  # a beam that is dead
        return tokens[first_child[node] : first_child[node + 1]].tolist() or [0]

    return allowed


def searches(bench: Bench, llm: Any, variant: str, width: int, catalog: str, prompt: list[int]) -> dict[str, Any]:
    """What finds `width` answers to a prompt, by name."""
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import BeamSearchParams

    prompts = [{"prompt_token_ids": prompt}]
    options: dict[str, Any] = {"max_tokens": NUM_LEVELS, "ignore_eos": True}
    ours = beam_params(width, compact=True, catalog="items", max_tokens=NUM_LEVELS)
    found = {OURS: partial(generate, llm, prompts, ours)}
    found[SAMPLING] = partial(generate, llm, prompts, SamplingParams(n=width, temperature=1.0, **options))
    if width <= MOST_CLIENT_ROWS:
        found[CLIENT_LOOP] = partial(
            llm_beam_search.original, llm, prompts, BeamSearchParams(beam_width=width, **options)
        )
    if width <= MOST_TRANSFORMERS_ROWS and bench.setting.is_toy and is_itself(variant):  # with others it takes minutes
        reference, ids = bench.reference(variant), torch.tensor([prompt])

        def transformers() -> Any:
            with torch.inference_mode():
                return reference.generate(
                    ids.to(reference.device),
                    attention_mask=torch.ones_like(ids),
                    num_beams=width,
                    num_return_sequences=width,
                    max_new_tokens=NUM_LEVELS,
                    do_sample=False,
                    prefix_allowed_tokens_fn=along(Catalog.open(catalog), len(prompt)),
                )

        found[TRANSFORMERS] = transformers
    return found


def measure(bench: Bench, variant: str, width: int) -> Measured:
    """One search at a time, the peers in turn, the prompt's prefix not cached."""
    num_items = bench.setting.pick(10**3, 10**6, 10**6)
    file = catalog_of(bench, variant, num_items)
    limits = {"max_num_seqs": max(width, 512), "max_num_batched_tokens": 8192}
    llm = bench.engine(variant, additional_config={"trie_beam": {"catalogs": {"items": file}}}, **limits)
    (prompt,) = bench.prompts(1, PROMPT_TOKENS)
    runs = searches(bench, llm, variant, width, file, prompt)

    def fresh(run: Callable[[], Any]) -> Callable[[], Any]:
        def from_an_empty_cache() -> Any:
            llm.reset_prefix_cache()
            return run()

        return from_an_empty_cache

    repeats = bench.setting.pick(1, 3, 3)
    seconds = alternate({name: fresh(run) for name, run in runs.items()}, repeats)
    ours, forwards, first = fresh(runs[OURS]), [], []
    for _ in range(repeats):
        with clocked(llm, {"forward": (runner_of(llm).model, "forward")}) as clock:
            total = timed(ours)
        in_forward = [step["forward"] for step in clock.steps if step["forward"]]
        forwards.append(total / sum(in_forward))
        decoding = [step for step in clock.steps if step["forward"]][1:]
        first.append(decoding[0]["whole step"] / statistics.median(step["forward"] for step in decoding))
    (output,) = ours()
    found = hypotheses(output)
    invalid = int((found.item_ids < 0).sum())
    times = [median_ratio(seconds[name], seconds[OURS]) if name in seconds else "-" for name in PEERS]
    own = 1000 * statistics.median(seconds[OURS])
    return Measured(
        [
            (
                variant,
                width,
                own,
                statistics.median(forwards),
                statistics.median(first),
                *times,
                f"{invalid} of {len(found.scores)}",
            )
        ]
    )


PEERS = (SAMPLING, CLIENT_LOOP, TRANSFORMERS)
TABLE = Table(
    "Retrieval: one search along a catalog of a million items",
    ("model", "beams", "ms", "times its forwards", "first expansion", *PEERS, "no items"),
    cells,
    measure,
    f"{NUM_LEVELS} tokens after a prompt of {PROMPT_TOKENS} that is not cached, all hypotheses returned; times its "
    "forwards: whole call over the time in the model's forward; first expansion: the first step of all rows over a "
    "forward; peers: their time over ours, in turn, medians; vLLM's search and sampling go without the catalog; no "
    "items: of what we return",
)

# Many at once.


def load_cells(setting: Setting) -> list[Cell]:
    numbers = setting.pick((2,), (1, 8), (1, 8, 32))
    return [
        (variant, number) for variant in variants(setting) for number in numbers if number < 32 or is_itself(variant)
    ]


def measure_load(bench: Bench, variant: str, groups: int) -> Measured:
    """Searches of 64 beams that arrive together, against as many calls of sampling."""
    from vllm import SamplingParams

    width, num_items = bench.setting.pick(8, 64, 64), bench.setting.pick(10**3, 10**6, 10**6)
    file = catalog_of(bench, variant, num_items)
    config = {"trie_beam": {"catalogs": {"items": file}}}
    llm = bench.engine(variant, additional_config=config, max_num_seqs=2048, max_num_batched_tokens=8192)
    prompts = [{"prompt_token_ids": prompt} for prompt in bench.prompts(groups, PROMPT_TOKENS // 2)]
    params = {
        OURS: beam_params(width, compact=True, catalog="items", max_tokens=NUM_LEVELS),
        SAMPLING: SamplingParams(n=width, temperature=1.0, max_tokens=NUM_LEVELS, ignore_eos=True),
    }
    runs = {name: partial(generate, llm, prompts, of_name) for name, of_name in params.items()}
    seconds = alternate(runs, bench.setting.pick(1, 3, 5))
    speeds = [groups / statistics.median(seconds[name]) for name in (OURS, SAMPLING)]
    return Measured([(variant, groups, width, *speeds, median_ratio(seconds[SAMPLING], seconds[OURS]))])


LOAD = Table(
    "Retrieval: searches at once",
    ("model", "searches", "beams", "searches/s", f"{SAMPLING}, calls/s", "its time, times ours"),
    load_cells,
    measure_load,
    f"{NUM_LEVELS} tokens along a catalog of a million items after prompts of {PROMPT_TOKENS // 2} tokens that are "
    "cached, all at once; in turn, medians",
)
