"""Items of a served catalog: `Retriever`, a client to copy, and a command that asks, or replaces a version."""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx

QUESTIONS = ["When it rains, I take", "To cut bread, you need", "To sleep well, I need"]


class RetrievalError(RuntimeError):
    """A server refuses a request, or cannot be reached; what is wrong, in a sentence."""


class Found(NamedTuple):
    """The items that a search has found, best first.

    Args:
        item_ids: [items], as the catalog has them.
        scores: [items] log-probabilities, the sums over an item's tokens, in nats.
    """

    item_ids: list[int]
    scores: list[float]


class Retriever:
    """Searches one catalog of a server. Use it as `async with Retriever(...) as retriever`, for many requests at once.

    Args:
        url: Of the server, or of the load balancer before several.
        model, catalog: As the server calls them.
        options: Further options of a search, as in docs/options.md: `{"catalog_renormalize": True}`.
        most_tokens: Of the longest item.
        seconds: That an answer may take.
    """

    def __init__(
        self,
        url: str,
        model: str,
        catalog: str,
        options: Mapping[str, Any] | None = None,
        most_tokens: int = 16,
        seconds: float = 60,
    ) -> None:
        self._body = {"model": model, "max_tokens": most_tokens}
        self._options = {"catalog": catalog, "compact": True, "length_penalty": 0.0, **(options or {})}
        # vLLM closes a connection after five idle seconds; a request must not be given one that is about to close.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
        self._http = httpx.AsyncClient(base_url=url, timeout=seconds, limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def find(self, prompt: str | list[int], width: int, history: Sequence[int] = ()) -> Found:
        """The best items after a prompt; fewer than `width` if the catalog has no more.

        Args:
            prompt: A text, or token ids.
            width: Beams, each of which finds an item.
            history: Ids of items that are not to be found.

        Raises:
            RetrievalError: the server refuses the request, or cannot be reached.
        """
        options = self._options | {"beam_width": width} | excluding(history)
        body = self._body | {"prompt": prompt, "vllm_xargs": options}
        answer = (await post(self._http, "/v1/completions", body))["kv_transfer_params"]["trie_beam"]
        return Found(answer["item_ids"], answer["cumulative_logprobs"])


def excluding(history: Sequence[int]) -> dict[str, str]:
    """The option of a request that keeps a user's history out of its answer."""
    return {"exclude_items": json.dumps([*history])} if history else {}


async def replace(urls: Sequence[str], catalog: str, file: str, seconds: float = 600) -> dict[str, Any]:
    """Let servers take a new version of a catalog, while they answer requests, and return what it is.

    Searches under way end on the version on which they began. Name each server: a load balancer would tell one alone.

    Args:
        urls: Of all servers.
        catalog: As the servers call it.
        file: In the servers' `catalog_folder`.
        seconds: That loading may take.

    Raises:
        RetrievalError: a server refuses the file, in which case it keeps its version, or cannot be reached; or the
            servers have different files of this name.
    """

    async def tell(url: str) -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=url, timeout=seconds) as http:
            return await post(http, f"/v1/catalogs/{catalog}", {"file": file})

    versions = await asyncio.gather(*map(tell, urls))
    if len({one["digest"] for one in versions}) > 1:
        digests = ", ".join(f"{url}: {one['digest']}" for url, one in zip(urls, versions, strict=True))
        raise RetrievalError(f"{file} differs between servers, which have taken it: {digests}")
    return versions[0]


async def post(http: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """What a server answers.

    Raises:
        RetrievalError: it refuses, or cannot be reached.
    """
    try:
        answer = await http.post(path, json=body)
    except httpx.HTTPError as error:
        raise RetrievalError(f"{http.base_url} does not answer: {error or type(error).__name__}") from None
    if answer.is_error:
        raise RetrievalError(f"{http.base_url} refuses: {reason(answer)}")
    return answer.json()


def reason(refusal: httpx.Response) -> str:
    """Why a server refuses, in its words."""
    try:
        return str(refusal.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {refusal.status_code}, {refusal.text[:200]}"


async def ask(arguments: argparse.Namespace) -> None:
    """Print the best items after each prompt."""
    async with Retriever(arguments.url[0], arguments.model, arguments.catalog) as retriever:
        for prompt in arguments.prompt or QUESTIONS:
            found = await retriever.find(prompt, arguments.beam_width, arguments.history)
            print(prompt)
            for item_id, score in list(zip(*found, strict=True))[: arguments.show]:
                print(f"  {score:8.4f}  item {item_id}")


async def main(arguments: argparse.Namespace) -> None:
    if arguments.replace_by is None:
        await ask(arguments)
    else:
        version = await replace(arguments.url, arguments.catalog, arguments.replace_by)
        print(f"  {version['name']}: {version['items']:,} items, digest {version['digest']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="*", help="default: three questions")
    parser.add_argument("--url", nargs="+", default=["http://localhost:8000"], help="to replace a version: all servers")
    parser.add_argument("--model", default="smollm2", help="as the server calls it")
    parser.add_argument("--catalog", default="items", help="as the server calls it")
    parser.add_argument("--beam-width", type=int, default=10)
    parser.add_argument("--show", type=int, default=3, help="how many items")
    parser.add_argument("--history", type=int, nargs="+", default=(), metavar="ID", help="items that are not wanted")
    parser.add_argument(
        "--replace-by", metavar="FILE", help="a new version, in the server's catalog_folder; asks nothing"
    )
    try:
        asyncio.run(main(parser.parse_args()))
    except RetrievalError as error:
        sys.exit(f"{parser.prog}: {error}")
