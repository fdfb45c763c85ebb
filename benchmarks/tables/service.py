"""A retrieval service under load: servers with beams along a catalog, and with vLLM's own beams, and transformers.

The load is that of benchmarks/arrivals.py; the server with beams is asked by the client of examples/retrieve. A prompt
is the end of a user's history: the tokens of items, sampled anew for each request, so that no prompt is cached. One
search returns nothing of the whole history. To measure a shape that others publish, build a catalog of it by
examples/retrieve/make_items.py and pass --catalog, --widths and --prompt-tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import httpx
import numpy as np

from benchmarks.arrivals import PERCENTILES, Ask, Load, closed_loop, open_loop
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.models import AS_IT_IS, longest
from benchmarks.server import Server
from benchmarks.tables.retrieval import along, catalog_of
from examples.retrieve.client import Retriever, post
from vllm_trie.catalog import Catalog

OURS, OURS_RENORMALISED = "beams in the engine", "the same, renormalised"
OURS_NEW = "the same, renormalised, without the history"
CLIENT_LOOP, TRANSFORMERS = "vLLM's use_beam_search, without a catalog", "transformers generate, along the catalog"
MOST_ROWS = 2048  # at a time; further requests wait
MOST_TRANSFORMERS_ROWS = 256  # beyond them a search of a small model on a CPU takes many minutes
PROMPT_TOKENS = 128
HISTORY = 300  # items
SHARES = (0.5, 0.8)  # of the requests per second that a search reaches in a closed loop
LEAST_ARRIVALS = 8  # fewer say nothing of an open loop
WARM_UPS = 3
TIMES_BUDGET = 5  # which a load may take so that each client asks once, and some requests arrive
SECONDS = 600  # that an answer may take


def cells(setting: Setting) -> list[Cell]:
    widths = setting.widths or setting.pick((4,), (50, 256, 1000), (50, 256, 1000))
    return [(width,) for width in widths]


def measure(bench: Bench, width: int) -> Measured:
    """Closed loops of more and more clients, then arrivals at shares of what they reached; searches take turns."""
    catalog = Catalog.open(_file(bench))
    return Measured([(width, *row) for row in asyncio.run(_loads(bench, catalog, width))])


def _file(bench: Bench) -> str:
    return catalog_of(bench, AS_IT_IS, bench.setting.pick(10**3, 10**6, 10**6))


class User(NamedTuple):
    """Who asks what comes next.

    Args:
        history: Ids of items.
        prompt: Tokens of the last ones.
    """

    history: list[int]
    prompt: list[int]


async def _loads(bench: Bench, catalog: Catalog, width: int) -> list[Cell]:
    """What loads the searches, the search, how many requests, their number per second, `PERCENTILES` of their times."""
    setting, rows = bench.setting, list[Cell]()
    most, budget = setting.pick(4, 64, 256), setting.pick(5, 20, 120)
    async with AsyncExitStack() as stack:
        asks: dict[str, tuple[Ask, Iterator[User]]] = {}
        fit: dict[str, int] = {}  # requests, one at a time
        for search, opened in SEARCHES.items():
            if search == TRANSFORMERS and setting.size == "quick" and width > MOST_TRANSFORMERS_ROWS:
                continue
            ask = await stack.enter_async_context(opened(bench, catalog, width))
            coming = users(setting, catalog, f"{search} {width}")
            alone = await closed_loop(ask, [next(coming)], 1)  # warms up
            if alone.duration > budget:
                rows.append((_closed(1), search, *_figures(alone)))
                continue
            alone = await closed_loop(ask, [*islice(coming, WARM_UPS)], 1)
            fit[search] = max(1, min(most, int(budget / alone.seconds[-1])))
            asks[search] = ask, coming
        capacity = dict.fromkeys(asks, 0.0)
        for num_clients in setting.pick((1, 2), (1, 8, 32), (1, 4, 16, 32)):
            for search, (ask, coming) in asks.items():
                if num_clients > TIMES_BUDGET * fit[search]:
                    continue
                load = await closed_loop(ask, [*islice(coming, max(fit[search], num_clients))], num_clients)
                capacity[search] = max(capacity[search], load.per_second)
                rows.append((_closed(num_clients), search, *_figures(load)))
        for share in SHARES:
            for search, (ask, coming) in asks.items():
                rate = share * capacity[search]
                if TIMES_BUDGET * budget * rate < LEAST_ARRIVALS:
                    continue
                count = max(LEAST_ARRIVALS, min(most, int(budget * rate)))
                load = await open_loop(ask, [*islice(coming, count)], rate)
                rows.append((f"{rate:.2g} a second", search, *_figures(load)))
    return rows


def _closed(num_clients: int) -> str:
    return f"{num_clients} at a time"


def _figures(load: Load) -> Cell:
    return len(load.seconds), load.per_second, *load.percentiles


def users(setting: Setting, catalog: Catalog, cell: str) -> Iterator[User]:
    """Users whose prompts are as many items as there is room for, sampled anew without end.

    Args:
        cell: Cells share no prompts, as they may share a server with its prefix cache.
    """
    random = np.random.default_rng([*cell.encode()])
    count = max((setting.prompt_tokens or PROMPT_TOKENS) // catalog.longest, 1)
    while True:
        items = random.integers(0, catalog.num_items, max(HISTORY, count))
        prompt = [token for item in items[-count:].tolist() for token in catalog.sequence(item)]
        yield User(catalog.item_ids[items].tolist(), prompt)


def _server(bench: Bench, catalog: Catalog, *options: str) -> Server:
    """With limits that are alike for all searches; on a GPU several servers share it."""
    import torch

    length = min(longest(bench.setting.model), (bench.setting.prompt_tokens or PROMPT_TOKENS) + catalog.longest + 16)
    limits = ("--max-model-len", str(length), "--max-num-seqs", str(MOST_ROWS), "--max-num-batched-tokens", "8192")
    on_gpu = ("--no-enforce-eager", "--gpu-memory-utilization", "0.2") if torch.cuda.is_available() else ()
    return bench.server(*limits, *on_gpu, *options)


@asynccontextmanager
async def _ours(
    bench: Bench, catalog: Catalog, width: int, options: dict[str, Any] | None = None, excludes: bool = False
) -> AsyncIterator[Ask]:
    config = {"trie_beam": {"catalogs": {"items": _file(bench)}, "max_beam_width": MOST_ROWS}}
    server = _server(bench, catalog, "--plugin", "trie_beam", "--additional-config", json.dumps(config))
    async with Retriever(server.url, "target", "items", options, catalog.longest, SECONDS) as retriever:

        async def ask(user: User) -> None:
            had = user.history if excludes else []
            found = await retriever.find(user.prompt, width, had)
            if len(found.item_ids) != width:
                raise RuntimeError(f"{len(found.item_ids)} items were found, not {width}")
            if again := {*found.item_ids} & {*had}:
                raise RuntimeError(f"item {min(again)} was excluded, and found")

        yield ask


@asynccontextmanager
async def _client_loop(bench: Bench, catalog: Catalog, width: int) -> AsyncIterator[Ask]:
    """A server without the plugin, whose loop drops `allowed_token_ids` and structured outputs: all tokens compete."""
    server = _server(bench, catalog, "--max-logprobs", str(2 * MOST_ROWS))
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
    async with httpx.AsyncClient(base_url=server.url, timeout=SECONDS, limits=limits) as http:

        async def ask(user: User) -> None:
            search = {"use_beam_search": True, "n": width, "ignore_eos": True, "max_tokens": catalog.longest}
            answer = await post(http, "/v1/completions", {"model": "target", "prompt": user.prompt, **search})
            if len(answer["choices"]) != width:
                raise RuntimeError(f"{len(answer['choices'])} answers came back, not {width}")

        yield ask


@asynccontextmanager
async def _transformers(bench: Bench, catalog: Catalog, width: int) -> AsyncIterator[Ask]:
    """In this process, without HTTP, one search after the other."""
    import torch

    model, one_at_a_time = bench.reference(), asyncio.Lock()

    @torch.inference_mode()
    def search(prompt: list[int]) -> None:
        ids = torch.tensor([prompt], device=model.device)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=catalog.longest,
            length_penalty=0.0,
            do_sample=False,
            prefix_allowed_tokens_fn=along(catalog, len(prompt)),
        )

    async def ask(user: User) -> None:
        async with one_at_a_time:
            await asyncio.to_thread(search, user.prompt)

    yield ask


SEARCHES = {
    OURS: _ours,
    OURS_RENORMALISED: partial(_ours, options={"catalog_renormalize": True}),
    OURS_NEW: partial(_ours, options={"catalog_renormalize": True}, excludes=True),
    CLIENT_LOOP: _client_loop,
    TRANSFORMERS: _transformers,
}
TABLE = Table(
    "A retrieval service under load",
    ("beams", "load", "search", "requests", "requests/s", *(f"p{of}, ms" for of in PERCENTILES)),
    cells,
    measure,
    f"catalog of a million items unless --catalog names one; each prompt is another history of about {PROMPT_TOKENS} "
    f"tokens unless --prompt-tokens says how many, none cached; without the history: none of "
    f"{HISTORY} items is returned, by exclude_items; all beams are returned, ours as arrays; {MOST_ROWS} "
    "rows at once in vLLM; transformers without HTTP in the clients' process, its searches one after the other; "
    "searches take turns in being loaded; at a time: so many clients that each ask one after the other; a second: "
    f"Poisson arrivals, at {SHARES[0]} and {SHARES[1]} of the requests per second that this search reached with "
    "clients, times from when a request was due; of fewer than 100 requests p99 is the slowest, of fewer than 20 p95, "
    "too; loads that take too long here are left out, and where one search does so, its first one alone was run",
)
