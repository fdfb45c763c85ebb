"""The client of examples/retrieve, and the load that benchmarks/arrivals.py puts on a server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks import arrivals
from benchmarks.server import Server
from examples.retrieve import client
from examples.retrieve.client import Found, RetrievalError, Retriever, replace
from tests.support.documents import DOCUMENTS
from tests.support.served import PROMPTS, TITLES
from vllm_trie.catalog import Catalog

pytestmark = pytest.mark.slow

NUM_ITEMS, WIDTH = 12, 16  # wider than there are items, so that an answer has all of a version
VERSIONS = {"odd.catalog": range(1, 2 * NUM_ITEMS, 2), "even.catalog": range(0, 2 * NUM_ITEMS, 2)}  # ids of the items


@pytest.fixture
def restored(server: Server) -> Iterator[None]:
    """The server has the catalog again that others ask for."""
    yield
    asyncio.run(replace([server.url], "lines", "lines.catalog"))


@pytest.fixture(scope="module")
def versions(folder: Path) -> None:
    """Files of versions that have no item in common."""
    tokens = np.random.default_rng(0).permutation(1000)[: 6 * NUM_ITEMS].reshape(2, NUM_ITEMS, 3) + 10
    for rows, (file, ids) in zip(tokens.tolist(), VERSIONS.items(), strict=True):
        Catalog.from_sequences(rows, ids=ids).save(folder / file)


def find(server: Server, *, width: int = 8, catalog: str = "lines", history: tuple[int, ...] = ()) -> Found:
    async def ask() -> Found:
        async with Retriever(server.url, "target", catalog) as retriever:
            return await retriever.find(PROMPTS[0], width, history)

    return asyncio.run(ask())


def test_items_come_best_first_with_the_sums_of_their_log_probabilities(server: Server) -> None:
    found = find(server)
    assert sorted(found.item_ids) == [*range(len(TITLES))]
    assert found.scores == sorted(found.scores, reverse=True)
    options = {"beam_width": 8, "catalog": "lines", "length_penalty": 0.0}
    answer = server.client.completions.create(
        model="target", prompt=PROMPTS[0], max_tokens=16, n=1, logprobs=1, extra_body={"vllm_xargs": options}
    )
    (best,) = answer.choices
    assert best.text == TITLES[found.item_ids[0]]
    assert sum(best.logprobs.token_logprobs) == pytest.approx(found.scores[0], abs=1e-3)


def test_what_a_user_had_is_not_found(server: Server) -> None:
    best, *others = find(server).item_ids
    assert find(server, history=(best,)).item_ids == others
    assert find(server, width=2, history=(best, *others[:2])).item_ids == others[2:4]


def test_a_history_goes_into_the_request_as_json() -> None:
    assert client.excluding([12, 70]) == {"exclude_items": "[12, 70]"}
    assert client.excluding([]) == {}


@pytest.mark.usefixtures("versions", "restored")
def test_every_answer_is_wholly_of_one_version_while_versions_change(server: Server) -> None:
    """And of the new one if it was asked for after the server had taken it."""
    num_changes, num_clients = 4, 6

    async def run() -> list[tuple[set[str], Found]]:
        answers: list[tuple[set[str], Found]] = []  # with the files of which it may be
        current, is_over = {"odd.catalog"}, False

        async def ask(retriever: Retriever) -> None:
            while not is_over:
                may_be = set(current)
                running[asyncio.current_task()] = may_be
                answers.append((may_be, await retriever.find(PROMPTS[len(answers) % len(PROMPTS)], WIDTH)))
                del running[asyncio.current_task()]

        running: dict[asyncio.Task[None] | None, set[str]] = {}
        await replace([server.url], "lines", "odd.catalog")
        async with Retriever(server.url, "target", "lines") as retriever:
            clients = [asyncio.create_task(ask(retriever)) for _ in range(num_clients)]
            for number in range(1, 1 + num_changes):
                before = len(answers)
                while len(answers) < before + num_clients and not any(client.done() for client in clients):
                    await asyncio.sleep(0.01)
                file = [*VERSIONS][number % 2]
                current.add(file)
                for may_be in running.values():
                    may_be.add(file)
                await replace([server.url], "lines", file)
                current.intersection_update({file})
            is_over = True
            await asyncio.gather(*clients)
        return answers

    answers = asyncio.run(run())
    assert len(answers) >= num_changes * num_clients
    seen = set()
    for may_be, found in answers:
        (file,) = [file for file, ids in VERSIONS.items() if sorted(found.item_ids) == [*ids]]
        assert file in may_be
        seen.add(file)
    assert seen == {*VERSIONS}


@pytest.mark.usefixtures("versions", "restored")
def test_all_servers_take_a_version_and_it_is_told(server: Server) -> None:
    reply = asyncio.run(replace([server.url, server.url], "lines", "even.catalog"))
    assert (reply["name"], reply["items"]) == ("lines", NUM_ITEMS)
    assert server.http.get("/v1/catalogs").json() == [reply]
    assert sorted(find(server, width=WIDTH).item_ids) == [*VERSIONS["even.catalog"]]


def test_servers_with_different_files_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    async def post(http: httpx.AsyncClient, *_: object) -> dict[str, str]:
        return {"digest": str(http.base_url.port)}

    monkeypatch.setattr(client, "post", post)
    with pytest.raises(RetrievalError, match=r"^items-2\.catalog differs between servers, .*http://b:2: 2$"):
        asyncio.run(replace(["http://a:1", "http://b:2"], "items", "items-2.catalog"))


def test_what_goes_wrong_is_told_in_a_sentence(server: Server) -> None:
    with pytest.raises(RetrievalError, match=r"refuses: .*catalog='books' is unknown; known: lines"):
        find(server, catalog="books")
    with pytest.raises(RetrievalError, match=r"refuses: .*beam_width"):
        find(server, width=100_000)
    with pytest.raises(RetrievalError, match=r"refuses: .*cannot be read"):
        asyncio.run(replace([server.url], "lines", "none.catalog"))
    with pytest.raises(RetrievalError, match=r"^http://127\.0\.0\.1:1 does not answer: \S+"):
        asyncio.run(replace(["http://127.0.0.1:1"], "lines", "none.catalog"))
    answer = httpx.Response(502, text="Bad gateway")  # of a load balancer
    assert client.reason(answer) == "status 502, Bad gateway"


def test_the_code_of_the_readme_runs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    readme = DOCUMENTS["examples/retrieve/README.md"]
    (code,) = re.findall(r"^    import asyncio.*?^    asyncio\.run.*?$", readme, re.DOTALL | re.MULTILINE)
    for old, new in (
        ("http://localhost:8000", server.url),
        ("smollm2", "target"),
        ('"items"', '"lines"'),
        ("from client", "from examples.retrieve.client"),
    ):
        assert old in code
        code = code.replace(old, new)
    exec(re.sub("^    ", "", code, flags=re.MULTILINE), {})
    assert len(json.loads(capsys.readouterr().out)) == len(TITLES)


@pytest.mark.parametrize("arrival", [("--rate", "20"), ("--clients", "3")], ids=lambda option: option[0])
def test_a_server_is_measured_under_load(
    server: Server, arrival: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--url", server.url, "--model", "target", "--catalog", "lines"]
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps({"prompt": PROMPTS[0]}) + "\n" + json.dumps({"prompt": [5, 6, 7]}) + "\n")
    options = ["--search-options", '{"catalog_renormalize": true}', "--requests", "6", "--beam-width", "4"]
    arrivals.main([*where, *arrival, *options, "--input", str(requests)])
    figure = r"\d+ ms"
    shown = rf"^6 requests of 4 beams: \S+ a second, p50 {figure}, p95 {figure}, p99 {figure}$"
    assert re.search(shown, capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(SystemExit, match=r"refuses: .*'books' is unknown"):
        arrivals.main([*where, *arrival, "--catalog", "books"])
