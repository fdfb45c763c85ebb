"""Requests per second of a real server, by clients that ask one after the other: tokens in, arrays out."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.gpu_engines import published
from benchmarks.gpu_engines.options import CACHED, COMPUTED, along_catalog, as_flags, engine_options, prompts_of
from benchmarks.gpu_engines.published import NOTHING, Published
from benchmarks.server import serving

CLIENTS = (1, 4, 16, 32)
REQUESTS = 64  # of all clients together
MOST_ROWS = 2048  # at a time; further requests wait
ENDPOINT = "/inference/v1/generate"
TITLE = "Beams over HTTP"
COLUMNS = ("case", "clients", "prompt", "requests per second", "ms of a request", *published.COLUMNS)
NOTE = (
    f"bfloat16, weights without content, CUDA graphs; {ENDPOINT}, hypotheses as arrays, along a catalog, "
    f"renormalised; {REQUESTS} "
    f"requests of clients that each ask one after the other, {MOST_ROWS} rows at a time; ms: of a request, the median; "
    "prompt: computed for each request, or in the prefix cache; peers: requests per second, next to computed prompts, "
    f"as theirs are; {published.SOURCES}"
)


class Case(NamedTuple):
    """Clients that each ask for so many beams and tokens after a prompt.

    Args:
        model: Of `SHAPES`.
        width: Beams.
        num_tokens: Of an item.
        prompt_length: In tokens.
        num_clients: At a time.
        published: What peers have of it.
    """

    model: str
    width: int
    num_tokens: int
    prompt_length: int
    num_clients: int
    published: Published = NOTHING

    @property
    def name(self) -> str:
        return f"http:{self.width}x{self.num_clients}"

    @property
    def label(self) -> str:
        """As the table shows it."""
        return f"{self.model}, {self.width} beams, {self.num_tokens} tokens after {self.prompt_length}"


CASES = (
    *(Case("1.7B", 256, 3, 5000, clients, published.SERVED_256.get(clients, NOTHING)) for clients in CLIENTS),
    *(Case("1.7B", 50, 4, 2465, clients, published.SERVED_50.get(clients, NOTHING)) for clients in CLIENTS),
)
SMALL = (Case("tiny", 3, 3, 40, 2),)


@contextmanager
def running(cases: Sequence[Case], args: argparse.Namespace) -> Iterator[httpx.Client]:
    """A client of a server for cases that share one."""
    most_rows = min(MOST_ROWS, max(case.width * case.num_clients for case in cases))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = engine_options(cases[0].model, most_rows, folder, args)
        command = ("vllm", "serve", str(folder), "--served-model-name", "target")
        with (
            serving(folder / "log", "--enable-scale-out", *as_flags(options), command=command) as server,
            httpx.Client(base_url=server.url, timeout=600, limits=httpx.Limits(keepalive_expiry=2)) as client,
        ):
            yield client


def requests_per_second(ask: Callable[[Any], None], asked: Sequence[Any], num_clients: int) -> tuple[float, float]:
    """And the median seconds of a request."""

    def timed(one: Any) -> float:
        start = time.perf_counter()
        ask(one)
        return time.perf_counter() - start

    start = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as clients:
        seconds = [*clients.map(timed, asked)]
    return len(asked) / (time.perf_counter() - start), statistics.median(seconds)


def rows(client: httpx.Client, case: Case, args: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """Rows of `COLUMNS`."""
    search = {"beam_width": case.width, "compact": True, **along_catalog(case.num_tokens)}
    params = {"max_tokens": case.num_tokens, "detokenize": False, "extra_args": search}

    def ask(prompt: dict[str, Any]) -> None:
        body = {"model": "target", "token_ids": prompt["prompt_token_ids"], "sampling_params": params}
        client.post(ENDPOINT, json=body).raise_for_status()

    for kind in (COMPUTED, CACHED):
        prompts = prompts_of(case.name, kind, case.prompt_length, 1)
        requests_per_second(ask, [next(prompts)[0] for _ in range(case.num_clients)], case.num_clients)  # warms up
        asked = [next(prompts)[0] for _ in range(case.num_clients if args.rehearse else REQUESTS)]
        speed, seconds = requests_per_second(ask, asked, case.num_clients)
        peers = case.published if kind == COMPUTED else NOTHING
        yield case.label, case.num_clients, kind, speed, 1000 * seconds, *peers
