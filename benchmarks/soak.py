"""`make soak`: a server under mixed traffic for an hour, and whether it is as well at the end as at the beginning.

Searches of all kinds and ordinary requests come from several clients at once. Some clients vanish, catalogs are
replaced while they are searched along, and there are too few KV blocks for all, so that requests are preempted. Some
requests are as large as they may be, others larger, which must be refused; now and then the engine is paused, which
aborts what runs. What a request is answered is compared with what the same request was answered when nothing else ran.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil
from tqdm import tqdm

from benchmarks.common import PAIR, TARGET, console, show
from benchmarks.server import Server, serving
from benchmarks.stdlib_pair.corpus import held_out_prompts
from benchmarks.tables.retrieval import NUM_LEVELS, synthetic
from vllm_trie.catalog import Catalog
from vllm_trie.catalog.items import CatalogItems

MINUTES, CLIENTS, SEED = 60, 12, 0
NUM_PROMPTS = 6
VANISHING, MOST_PATIENCE = 0.15, 1.5  # share of requests, and seconds after which their clients are gone at the latest
SECONDS_BETWEEN_VERSIONS, SECONDS_BETWEEN_SAMPLES, SECONDS_BETWEEN_PAUSES = 20.0, 5.0, 45.0
LONGEST_REFUSAL = 500  # characters
LAST_CHARACTERS = 10_000  # of the log of a server that fails
NEAR = 1e-3  # log-probability by which answers that differ may differ in all
MOST_GROWTH, SETTLED_AFTER = 0.05, 10  # of memory; minutes
KV_CACHE_BYTES = 20 << 20  # 160 blocks
SCORER = "shortest"
CATALOG, VERSIONS = "items", {"first.catalog": 1000, "second.catalog": 3000}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "done": {"type": "boolean"}},
    "required": ["name", "done"],
    "additionalProperties": False,
}


VOCABULARY = 1024  # tokens, at least
STOPS = [*range(64, VOCABULARY, 2)]


def beams(width: int, **options: Any) -> dict[str, Any]:
    return {"vllm_xargs": {"beam_width": width, **options}}


def items(number: int, seed: int) -> str:
    """So many items of three tokens, as a request names them."""
    return json.dumps(np.random.default_rng(seed).integers(64, VOCABULARY, (number, 3)).tolist())


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 48},
    "sampled": {"temperature": 0.8, "max_tokens": 48},
    "4 beams": {**beams(4, speculation="off"), "n": 4, "max_tokens": 40},
    "48 beams": {**beams(48, length_penalty=0.5), "n": 8, "max_tokens": 24},
    "early stopping, stop string": {**beams(6, early_stopping=True), "n": 2, "max_tokens": 60, "stop": ["\n\n"]},
    "use_beam_search": {"use_beam_search": True, "n": 3, "max_tokens": 32},
    "speculating": {**beams(4, speculation="exact", draft_width=8), "max_tokens": 64},
    "speculating where it pays": {**beams(3), "max_tokens": 64},
    "sampled beams": {**beams(4, do_sample=True), "temperature": 0.8, "max_tokens": 40},
    "streamed": {**beams(4), "stream": True, "max_tokens": 40},
    "catalog": {**beams(32, catalog=CATALOG), "n": 8, "max_tokens": NUM_LEVELS},
    "schema": {**beams(4), "n": 2, "max_tokens": 48, "structured_outputs": {"json": SCHEMA}},
    "groups": {**beams(6, num_beam_groups=3, diversity_penalty=0.5), "n": 6, "max_tokens": 32},
    "no n-gram twice": {**beams(4, no_repeat_ngram_size=3), "max_tokens": 40},
    "stochastic": {**beams(4, do_sample=True, stochastic=True), "n": 4, "max_tokens": 32},
    "steps": {**beams(2, unit="step", step_stop=["\n"], scorer=SCORER, candidates=3, max_steps=4), "max_tokens": 64},
    "next turn": {**beams(3), "max_tokens": 24},
    "480 stop tokens": {**beams(4), "n": 4, "max_tokens": 24, "stop_token_ids": STOPS},
    "480 stop tokens, vLLM's rules": {**beams(4, semantics="vllm"), "n": 4, "max_tokens": 8, "stop_token_ids": STOPS},
    "ignored EOS, not before 8 tokens": {**beams(4), "max_tokens": 24, "min_tokens": 8, "ignore_eos": True},
    "4 stop strings": {**beams(4), "max_tokens": 32, "stop": [f"\n{' ' * size}return" for size in (0, 4, 8, 12)]},
    "items of its own": {**beams(8, allowed_sequences=items(5_000, seed=1)), "n": 4, "max_tokens": 3},
    "other items of its own": {**beams(8, allowed_sequences=items(20_000, seed=2)), "n": 4, "max_tokens": 3},
    "boosted items": {
        **beams(8, allowed_sequences=items(2_000, seed=3), phrase_boosts=json.dumps([[[[70, 71], [72, 73, 74]], 2.0]])),
        "max_tokens": 3,
    },
    "contrast": {**beams(4, contrast='{"model": "draft", "alpha": 0.1, "beta": 0.5}'), "max_tokens": 24},
}
TOO_MUCH: dict[str, dict[str, Any]] = {  # what must be refused
    "a million widths": beams(4, beam_widths=[4] * 1_000_000),
    "10,000 unknown options": beams(4, **{f"option_{number}": 1 for number in range(10_000)}),
    "a name of a megabyte": beams(4, **{"x" * (1 << 20): 1}),
    "a stop string of a megabyte": {**beams(4), "stop": ["x" * (1 << 20)]},
    "too many items": beams(4, allowed_sequences=items(100_001, seed=0)),
}
FIRST_TURN = "4 beams"  # whose best hypothesis the next turn continues
NOT_COMPARED = ("sampled", "sampled beams", "stochastic", "steps")  # what is sampled depends on what else is


class Answer(NamedTuple):
    """Of one request.

    Args:
        texts: Of its choices.
        logprobs: Of each choice, the sum over its tokens; none where chunks do not tell it.
        is_aborted: The engine was paused before the answer was whole.
    """

    texts: tuple[str, ...]
    logprobs: tuple[float, ...]
    is_aborted: bool = False

    def is_near(self, other: Answer) -> bool:
        """Whether both might come of the same search, with other rounding."""
        pairs = zip(sorted(self.logprobs), sorted(other.logprobs), strict=False)
        return len(self.texts) == len(other.texts) and all(math.isclose(a, b, abs_tol=NEAR) for a, b in pairs)


async def ask(client: httpx.AsyncClient, kind: str, prompt: str) -> Answer:
    """What a prompt is answered.

    Raises:
        httpx.HTTPError: the server refuses, or is gone.
    """
    body = {"model": "target", "prompt": prompt, "logprobs": 1, **KINDS[kind]}
    if not body.get("stream"):
        response = await client.post("/v1/completions", json=body)
        await raise_if_refused(response)
        choices = response.json()["choices"]
        sums = (math.fsum((one["logprobs"] or {"token_logprobs": ()})["token_logprobs"]) for one in choices)
        is_aborted = any(one["finish_reason"] == "abort" for one in choices)
        return Answer(tuple(one["text"] for one in choices), tuple(sums), is_aborted)
    is_aborted = False
    texts: dict[int, str] = defaultdict(str)
    logprobs: dict[int, float] = defaultdict(float)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        await raise_if_refused(response)
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    texts[choice["index"]] += choice["text"]
                    is_aborted |= choice["finish_reason"] == "abort"
                    if choice["logprobs"] is not None:
                        logprobs[choice["index"]] += math.fsum(choice["logprobs"]["token_logprobs"])
    return Answer(tuple(texts[i] for i in sorted(texts)), tuple(logprobs[i] for i in sorted(logprobs)), is_aborted)


async def raise_if_refused(response: httpx.Response) -> None:
    """Raise httpx.HTTPError with what the server says."""
    if response.is_error:
        raise httpx.HTTPError((await response.aread()).decode())


async def outcome_of_too_much(client: httpx.AsyncClient, kind: str, prompt: str) -> str:
    """What becomes of what is too much: "refused" in a sentence, "aborted" while it is read, by a pause, or "wrong"."""
    try:
        response = await client.post("/v1/completions", json={"model": "target", "prompt": prompt, **TOO_MUCH[kind]})
    except httpx.HTTPError as error:
        console.print(f"{kind}: {error!r}")
        return "wrong"
    if response.is_success and all(one["finish_reason"] == "abort" for one in response.json()["choices"]):
        return "aborted"
    is_refusal = response.status_code == httpx.codes.BAD_REQUEST
    is_short = is_refusal and len(response.json()["error"]["message"]) <= LONGEST_REFUSAL
    if not is_short:
        console.print(f"{kind}: {response.status_code}, {response.text[:LONGEST_REFUSAL]}", markup=False)
    return "refused" if is_short else "wrong"


class Soak:
    """The traffic of one run, and what came of it.

    Args:
        server: That is tried.
        random: Which decides who asks what, and who vanishes.
    """

    def __init__(self, server: Server, random: random.Random) -> None:
        self.server, self.random = server, random
        self.prompts = held_out_prompts(NUM_PROMPTS)
        self.expected: dict[tuple[str, str], list[Answer]] = defaultdict(list)
        self.outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in (*KINDS, *TOO_MUCH)}
        self.wrong: list[tuple[str, str, Answer, list[Answer]]] = []
        self.memory: list[tuple[float, int]] = []  # seconds since the beginning, bytes of all processes
        self.num_versions = self.num_pauses = 0

    async def run(self, minutes: float) -> None:
        """Learn what is right, then let all clients loose."""
        # Each request has a connection of its own: httpx may close an idle one that it has just given to a request.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.server.url, limits=limits, timeout=600) as client:
            await self._learn(client)
            start = time.monotonic()
            end = start + 60 * minutes
            with tqdm(total=round(60 * minutes), unit="s") as progress:
                clients = [self._client(client, end) for _ in range(CLIENTS)]
                events = (
                    self._replace_catalogs(client, end),
                    self._pause(client, end),
                    self._watch(start, end, progress),
                )
                await asyncio.gather(*clients, *events)

    async def _learn(self, client: httpx.AsyncClient) -> None:
        """What each request is answered if it is alone, along each version of the catalog."""
        pairs = [(kind, prompt) for kind in KINDS if kind not in NOT_COMPARED for prompt in self.prompts]
        for version in reversed(VERSIONS):
            await self._take(client, version)
            for kind, prompt in tqdm(pairs, desc=f"answers to compare with, {version}", leave=False):
                if kind == "catalog" or not self.expected[kind, prompt]:
                    self.expected[kind, prompt].append(await self._ask(client, kind, prompt))

    async def _ask(self, client: httpx.AsyncClient, kind: str, prompt: str) -> Answer:
        """What a prompt is answered, or what comes after its answer."""
        answer = self.expected[FIRST_TURN, prompt][0].texts[0] if kind == "next turn" else ""
        return await ask(client, kind, prompt + answer)

    async def _take(self, client: httpx.AsyncClient, version: str) -> None:
        await raise_if_refused(await client.post(f"/v1/catalogs/{CATALOG}", json={"file": version}))

    async def _client(self, client: httpx.AsyncClient, end: float) -> None:
        while time.monotonic() < end:
            kind, prompt = self.random.choice([*self.outcomes]), self.random.choice(self.prompts)
            outcomes = self.outcomes[kind]
            if kind in TOO_MUCH:
                outcomes[await outcome_of_too_much(client, kind, prompt)] += 1
                continue
            vanishes = self.random.random() < VANISHING
            patience = self.random.uniform(0, MOST_PATIENCE) if vanishes else None
            try:
                answer = await asyncio.wait_for(self._ask(client, kind, prompt), patience)
            except TimeoutError:
                outcomes["vanished"] += 1
            except httpx.HTTPError as error:
                outcomes["failed"] += 1
                console.print(f"{kind}: {error!r}")
            else:
                outcomes[self.judged(kind, prompt, answer)] += 1

    def judged(self, kind: str, prompt: str, answer: Answer) -> str:
        """Which outcome it is."""
        if answer.is_aborted:
            return "aborted"
        if kind in NOT_COMPARED:
            return "answered"
        expected = self.expected[kind, prompt]
        if any(answer.texts == one.texts for one in expected):
            return "the same"
        if any(answer.is_near(one) for one in expected):
            return "near-ties"
        self.wrong.append((kind, prompt, answer, expected))
        return "wrong"

    async def _replace_catalogs(self, client: httpx.AsyncClient, end: float) -> None:
        versions = [*VERSIONS]
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(SECONDS_BETWEEN_VERSIONS, left))
            self.num_versions += 1
            await self._take(client, versions[self.num_versions % len(versions)])

    async def _pause(self, client: httpx.AsyncClient, end: float) -> None:
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(SECONDS_BETWEEN_PAUSES, left))
            await raise_if_refused(await client.post("/pause", params={"mode": "abort"}))
            await raise_if_refused(await client.post("/resume"))
            self.num_pauses += 1

    async def _watch(self, start: float, end: float, progress: tqdm) -> None:
        parent = psutil.Process(self.server.process.pid)
        while (left := end - time.monotonic()) > 0:
            total = sum(process.memory_info().rss for process in (parent, *parent.children(recursive=True)))
            seconds = time.monotonic() - start
            self.memory.append((seconds, total))
            progress.update(round(seconds) - progress.n)
            progress.set_postfix(
                GiB=f"{total / 2**30:.2f}", answers=sum(sum(of.values()) for of in self.outcomes.values())
            )
            await asyncio.sleep(min(SECONDS_BETWEEN_SAMPLES, left))


def growth(memory: Sequence[tuple[float, int]], minutes: float) -> float:
    """By how much of itself memory grew, from minute 10 on, in a short run from its middle on: medians of a sixth."""
    settled = [size for seconds, size in memory if seconds >= 60 * min(SETTLED_AFTER, minutes / 2)]
    sixth = max(len(settled) // 6, 1)
    return statistics.median(settled[-sixth:]) / statistics.median(settled[:sixth]) - 1


def error_lines(log: str) -> list[str]:
    """What a server that is well does not print."""
    return [line for line in log.splitlines() if re.search(r"\b(ERROR|CRITICAL)\b|Traceback|Exception", line)]


def write_catalogs(folder: Path) -> None:
    """The versions of the catalog, for the trained target."""
    from transformers import AutoConfig, AutoTokenizer

    from vllm_trie.catalog import tokenizer_digest

    vocab_size = AutoConfig.from_pretrained(TARGET).vocab_size
    digest = tokenizer_digest(AutoTokenizer.from_pretrained(TARGET))
    for name, num_items in VERSIONS.items():
        rows, lengths = synthetic(num_items, vocab_size), np.full(num_items, NUM_LEVELS, np.int32)
        Catalog.from_items(CatalogItems(rows.ravel(), lengths, np.arange(num_items)), vocab_size, digest).save(
            folder / name
        )


class ShortestFirst(BaseHTTPRequestHandler):
    """A scorer of steps: the shorter, the better."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"scores": [-len(candidate["text"]) for candidate in body["candidates"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def scoring() -> Iterator[str]:
    """The URL of a scorer that runs meanwhile."""
    with ThreadingHTTPServer(("127.0.0.1", 0), ShortestFirst) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def options_of(folder: Path, scorer: str) -> Iterator[str]:
    """Of `vllm serve`."""
    catalogs = {CATALOG: str(folder / next(iter(VERSIONS)))}
    of_beams = {"catalogs": catalogs, "catalog_folder": str(folder), "scorers": {SCORER: scorer}}
    drafts = {"method": "draft_model", "model": str(PAIR / "draft"), "num_speculative_tokens": 4}
    yield "--no-log-error-stack"  # else, as /pause needs VLLM_SERVER_DEV_MODE, each refusal is an error in the log
    yield from ("--plugin", "trie_beam", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES))
    yield from ("--max-num-seqs", "160", "--speculative-config", json.dumps(drafts))
    yield from ("--additional-config", json.dumps({"trie_beam": of_beams}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of traffic")
    parser.add_argument("--seed", type=int, default=SEED, help="of who asks what, and who vanishes")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as name, scoring() as scorer:
        folder = Path(name)
        write_catalogs(folder)
        console.print(f"Starting a server for {args.minutes:g} minutes of traffic from {CLIENTS} clients ...")
        os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for /pause
        with serving(folder / "log", *options_of(folder, scorer)) as server:
            soak = Soak(server, random.Random(args.seed))
            try:
                asyncio.run(soak.run(args.minutes))
            except httpx.HTTPError:
                console.print((folder / "log").read_text()[-LAST_CHARACTERS:], markup=False)
                raise
            server.wait_until_idle("vllm:trie_beam_groups_running", "vllm:trie_beam_rows_running")
            counters = {
                "preemptions": server.gauge("vllm:num_preemptions_total"),
                "of them of groups": server.gauge("vllm:trie_beam_preemptions_total"),
                "searches aborted": server.gauge("vllm:trie_beam_groups_finished_total", label='"abort"'),
                "KV blocks of answers kept": server.gauge("vllm:trie_beam_kv_blocks_cached_total"),
                "versions of the catalog": soak.num_versions,
                "pauses": soak.num_pauses,
            }
            errors = error_lines((folder / "log").read_text())  # vLLM logs that its engine is gone at the end
    report(soak, args, counters, errors)


def report(soak: Soak, args: argparse.Namespace, counters: dict[str, float], errors: list[str]) -> None:
    """Print what came of it; exit with status 1 unless all is well."""
    outcomes = ("the same", "near-ties", "wrong", "answered", "aborted", "vanished", "refused", "failed")
    rows = [(kind, *(of_kind[outcome] for outcome in outcomes)) for kind, of_kind in soak.outcomes.items()]
    rows.append(("all", *(sum(row[1 + place] for row in rows) for place in range(len(outcomes)))))
    show("Requests", ("kind", *outcomes), rows)
    grown = growth(soak.memory, args.minutes)
    sizes = [size / 2**30 for _, size in soak.memory]
    show(
        "The server",
        ("what", "found"),
        [
            ("memory, GiB: at first, most, last", f"{sizes[0]:.2f}, {max(sizes):.2f}, {sizes[-1]:.2f}"),
            ("memory once settled, grown by", f"{100 * grown:.1f} %"),
            ("requests, rows, KV blocks at the end", "none"),
            *((name, f"{count:.0f}") for name, count in counters.items()),
            ("lines of errors in its log", str(len(errors))),
        ],
    )
    for kind, prompt, answer, expected in soak.wrong[:3]:
        console.print(f"wrong, {kind}: {prompt!r}\n  alone: {expected}\n  here: {answer}", markup=False)
    for line in errors[:5]:
        console.print(line, markup=False)
    if args.out is not None:
        found = {"minutes": args.minutes, "seed": args.seed, "growth": grown, **counters, "error lines": len(errors)}
        args.out.write_text(json.dumps({**found, "requests": soak.outcomes, "memory": soak.memory}, indent=1))
    num_failed, num_wrong = (sum(of[outcome] for of in soak.outcomes.values()) for outcome in ("failed", "wrong"))
    missing = [name for name, count in counters.items() if not count]
    faults = {
        "wrong answers": num_wrong,
        "requests failed": num_failed,
        "lines of errors": len(errors),
        f"memory grew by more than {MOST_GROWTH:.0%}": grown > MOST_GROWTH,
        f"never happened: {', '.join(missing)}": bool(missing),
    }
    sys.exit("; ".join(name for name, found in faults.items() if found) or None)


if __name__ == "__main__":
    main()
