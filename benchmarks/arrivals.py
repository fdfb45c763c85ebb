"""How long requests to a served catalog take under load: `python -m benchmarks.arrivals --help`.

Requests arrive at random, a given number a second on average (Poisson), whether earlier ones are answered or not, as
those of many users do; or from so many clients that each ask one after the other. `tables/service.py` compares
searches by both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.retrieve.client import QUESTIONS, RetrievalError, Retriever

SEED = 0
PERCENTILES = (50, 95, 99)

Ask = Callable[[Any], Awaitable[object]]


class Load(NamedTuple):
    """What a run of requests gave.

    Args:
        seconds: [requests], from a request's arrival to its answer.
        duration: Seconds from the first arrival to the last answer.
    """

    seconds: np.ndarray
    duration: float

    @property
    def per_second(self) -> float:
        """Requests that were answered."""
        return len(self.seconds) / self.duration

    @property
    def percentiles(self) -> list[float]:
        """Milliseconds that `PERCENTILES` of the requests take at most; of few requests the last are the slowest."""
        return [1000 * float(one) for one in np.percentile(self.seconds, PERCENTILES, method="higher")]


async def open_loop(ask: Ask, requests: Sequence[Any], rate: float) -> Load:
    """Requests that arrive by a Poisson process.

    A request's time counts from when it was due, so that it has no advantage of a client that is late.

    Args:
        ask: Answers one request.
        requests: In the order of their arrival.
        rate: Arrivals per second, on average.
    """
    start = time.perf_counter()
    due = start + np.random.default_rng(SEED).exponential(1 / rate, len(requests)).cumsum()

    async def answered(request: Any, arrival: float) -> float:
        await asyncio.sleep(arrival - time.perf_counter())
        await ask(request)
        return time.perf_counter() - arrival

    seconds = np.array(await asyncio.gather(*map(answered, requests, due)))
    return Load(seconds, float((due + seconds).max() - due[0]))


async def closed_loop(ask: Ask, requests: Sequence[Any], num_clients: int) -> Load:
    """Requests of clients that each ask one after the other."""
    left, seconds = iter(requests), list[float]()

    async def client() -> None:
        for request in left:
            arrival = time.perf_counter()
            await ask(request)
            seconds.append(time.perf_counter() - arrival)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    return Load(np.array(seconds), time.perf_counter() - start)


def read_requests(path: Path | None) -> list[dict[str, Any]]:
    """Each with a `prompt`, and maybe a `history`.

    Raises:
        ValueError: a line is no request.
    """
    if path is None:
        return [{"prompt": question} for question in QUESTIONS]
    requests = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            request = json.loads(line)
            requests.append({"prompt": request["prompt"], "history": request.get("history", ())})
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ValueError(f'line {number} of {path} is no object with a "prompt"') from None
    if not requests:
        raise ValueError(f"{path} has no requests")
    return requests


async def measured(args: argparse.Namespace) -> Load:
    """The load that the command's arguments ask for."""
    requests = [*islice(cycle(read_requests(args.input)), args.requests)]
    async with Retriever(
        args.url, args.model, args.catalog, args.search_options, args.max_tokens, seconds=600
    ) as retriever:

        async def ask(request: dict[str, Any]) -> None:
            await retriever.find(width=args.beam_width, **request)

        await ask(requests[0])  # warms up
        if args.rate is None:
            return await closed_loop(ask, requests, args.clients)
        return await open_loop(ask, requests, args.rate)


def load_parser() -> argparse.ArgumentParser:
    """Of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.arrivals", description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", default="smollm2", help="as the server calls it")
    parser.add_argument("--catalog", default="items", help="as the server calls it")
    parser.add_argument("--beam-width", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=16, help="of the longest item")
    parser.add_argument("--search-options", type=options, default={}, help="further options of a search, as JSON")
    parser.add_argument("--requests", type=positive(int), default=200, help="of all clients together")
    help_text = (
        'JSON lines with a "prompt", a text or token ids, and maybe a "history" of item ids; default: three questions'
    )
    parser.add_argument("--input", type=Path, metavar="FILE", help=help_text)
    arrivals = parser.add_mutually_exclusive_group(required=True)
    arrivals.add_argument("--rate", type=positive(float), help="arrivals per second, at random")
    arrivals.add_argument("--clients", type=positive(int), help="that each ask one after the other")
    return parser


def options(text: str) -> dict[str, Any]:
    """Reads options from a JSON object."""
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object") from None


def positive(kind: type) -> Callable[[str], Any]:
    """Reads numbers above 0."""

    def read(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
        return number

    return read


def main(arguments: Sequence[str] | None = None) -> None:
    """Ends with status 1, and one sentence, if the server or the file is not as it must be."""
    args = load_parser().parse_args(arguments)
    try:
        load = asyncio.run(measured(args))
    except (ValueError, OSError, RetrievalError) as error:
        sys.exit(f"python -m benchmarks.arrivals: {error}")
    shown = ", ".join(f"p{of} {ms:.0f} ms" for of, ms in zip(PERCENTILES, load.percentiles, strict=True))
    print(f"{len(load.seconds)} requests of {args.beam_width} beams: {load.per_second:.2f} a second, {shown}")


if __name__ == "__main__":
    main()
