"""Requests per second of a real server, by clients that ask one after the other: tokens in, arrays out."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.gpu_engines import published
from benchmarks.gpu_engines.options import (
    CACHED,
    COMPUTED,
    along_catalog,
    as_flags,
    engine_options,
    folder_of,
    prompts_of,
    seconds_left,
)
from benchmarks.gpu_engines.published import NOTHING, Published
from benchmarks.gpu_engines.replies import arrays_of, check_cached, check_hypotheses

if TYPE_CHECKING:
    import httpx

REQUESTS, REQUESTS_OF_EACH = 64, 8  # of all clients together, and of each: the larger of both numbers
RUNS, MOST_SECONDS = 2, 15  # of so many requests, unless the first took longer
REQUEST_SECONDS = 600
MOST_ROWS = 2048  # at a time; further requests wait
ENDPOINT = "/inference/v1/generate"
TITLE = "Beams over HTTP"
COLUMNS = ("case", "clients", "prompt", "requests per second", "ms of a request", "runs", *published.COLUMNS)
NOTE = (
    f"bfloat16, weights without content, CUDA graphs; {ENDPOINT}, hypotheses as arrays; catalogs: renormalised; a run: "
    f"{REQUESTS} requests, at least {REQUESTS_OF_EACH} of each of the clients, which ask one after the other, after as "
    f"many that warm up, {MOST_ROWS} rows at a time; ms: of a request, the median; medians of so many runs; "
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
        is_along_catalog: Or on the open vocabulary.
    """

    model: str
    width: int
    num_tokens: int
    prompt_length: int
    num_clients: int
    published: Published = NOTHING
    is_along_catalog: bool = True

    @property
    def name(self) -> str:
        return f"http:{self.width}x{self.num_clients}" + ":open" * (not self.is_along_catalog)

    @property
    def label(self) -> str:
        """As the table shows it."""
        shape = f"{self.model}, {self.width} beams, {self.num_tokens} tokens after {self.prompt_length}"
        return shape + ", along a catalog" * self.is_along_catalog


CASES = (
    *(Case("1.7B", 256, 3, 5000, 4, published.SERVED_256, along) for along in (False, True)),
    *(Case("1.7B", 50, 4, 2465, clients, own) for clients, own in published.SERVED_50.items()),
    *(Case("1.7B", 256, 3, 5000, clients) for clients in (1, 16, 32)),
    Case("1.7B", 50, 4, 2465, 4),
)
SMALL = tuple(Case("tiny", 3, 3, 70, 2, is_along_catalog=along) for along in (False, True))


@contextmanager
def running(cases: Sequence[Case], args: argparse.Namespace) -> Iterator[httpx.Client]:
    """A client of a server for cases that share one."""
    import httpx

    from benchmarks.server import START_SECONDS, serving

    most_rows = min(MOST_ROWS, max(case.width * case.num_clients for case in cases))
    folder = folder_of(cases[0].model)
    options = engine_options(cases[0].model, most_rows, folder, args)
    command = ("vllm", "serve", str(folder), "--served-model-name", "target")
    more = ("--enable-scale-out", "--enable-prompt-tokens-details", *as_flags(options))
    args.out.mkdir(parents=True, exist_ok=True)
    log, start_seconds = args.out / "server.log", seconds_left(args, START_SECONDS)
    with (
        serving(log, *more, command=command, start_seconds=start_seconds) as server,
        httpx.Client(base_url=server.url, limits=httpx.Limits(keepalive_expiry=2)) as client,
    ):
        yield client


class Run(NamedTuple):
    """What clients measured that asked at the same time.

    Args:
        speed: Requests per second.
        seconds: Of a request, the median.
        replies: Of all requests.
    """

    speed: float
    seconds: float
    replies: list[Any]


def asked_by_clients(ask: Callable[[Any], Any], asked: Sequence[Any], num_clients: int) -> Run:
    """Ask it all, so many at a time."""

    def timed(one: Any) -> tuple[float, Any]:
        start = time.perf_counter()
        reply = ask(one)
        return time.perf_counter() - start, reply

    start = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as clients:
        seconds, replies = zip(*clients.map(timed, asked), strict=True)
    return Run(len(asked) / (time.perf_counter() - start), statistics.median(seconds), [*replies])


def check_reply(reply: dict[str, Any], case: Case, kind: str) -> None:
    """Raise RuntimeError unless it is that of a search of this case."""
    if reply["choices"][0]["finish_reason"] == "error":
        raise RuntimeError(f"a request failed: {reply['choices'][0]['stop_reason']}")
    check_hypotheses(arrays_of(reply["kv_transfer_params"]), case.width, case.num_tokens)
    check_cached(reply["usage"]["prompt_tokens_details"]["cached_tokens"], kind, case.prompt_length)


def rows(client: httpx.Client, case: Case, args: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """Rows of `COLUMNS`."""
    along = along_catalog(case.num_tokens) if case.is_along_catalog else {}
    search = {"beam_width": case.width, "compact": True, **along}
    params = {"max_tokens": case.num_tokens, "detokenize": False, "ignore_eos": not along, "extra_args": search}
    num_requests = case.num_clients if args.rehearse else max(REQUESTS, REQUESTS_OF_EACH * case.num_clients)

    def ask(prompt: dict[str, Any]) -> httpx.Response:
        body = {"model": "target", "token_ids": prompt["prompt_token_ids"], "sampling_params": params}
        reply = client.post(ENDPOINT, json=body, timeout=seconds_left(args, REQUEST_SECONDS))
        return reply.raise_for_status()

    for kind in (COMPUTED, CACHED):
        prompts = prompts_of(case.name, kind, case.prompt_length, 1)
        asked = [[one for (one,) in islice(prompts, num_requests)] for _ in range(1 + RUNS)]
        asked_by_clients(ask, asked[0], case.num_clients)  # a step's graph is captured when its shape comes again
        runs, end = list[Run](), time.perf_counter() + MOST_SECONDS
        while len(runs) < RUNS and not (runs and time.perf_counter() > end):
            runs.append(asked_by_clients(ask, asked[1 + len(runs)], case.num_clients))
        for reply in runs[-1].replies:
            check_reply(reply.json(), case, kind)
        speed, seconds = statistics.median(run.speed for run in runs), statistics.median(run.seconds for run in runs)
        peers = case.published if kind == COMPUTED else NOTHING
        yield case.label, case.num_clients, kind, speed, 1000 * seconds, len(runs), *peers
