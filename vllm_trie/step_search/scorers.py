"""Scorers of steps: a callable, vLLM's `LLM` of a pooling model, or an HTTP endpoint."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import httpx
from vllm import LLM
from vllm.logger import init_logger

from vllm_trie.options.parts import NO_SCORER
from vllm_trie.options.shown import listed_option_names, shown_option
from vllm_trie.step_search.scores import ScorerError, UnreachableScorerError

logger = init_logger("vllm.trie_beam.scorers")

TIMEOUT = 600.0  # seconds for the candidates of a round
UNREACHABLE = (httpx.HTTPError, httpx.InvalidURL, ValueError)  # the latter two if the URL is malformed


@dataclass(frozen=True)
class StepCandidate:
    """A candidate as a scorer sees it.

    Args:
        prompt: The text of the prompt.
        steps: The text of each step, the new one last.
        token_ids: Of all steps, concatenated.
        scores: The scores after each earlier step.
        is_finished: Whether it cannot go on.
        lookahead: The text that the model would write next, greedily, in up to `lookahead` tokens.
    """

    prompt: str
    steps: tuple[str, ...]
    token_ids: tuple[int, ...]
    scores: tuple[float, ...]
    is_finished: bool
    lookahead: str = ""

    @property
    def text(self) -> str:
        """The text of all steps."""
        return "".join(self.steps)

    @property
    def text_ahead(self) -> str:
        """The text of all steps and the lookahead, which scorers of texts judge."""
        return self.text + self.lookahead


Scorer: TypeAlias = Callable[[list[StepCandidate]], Iterable[Any]]  # a number for each, the higher the better


def step_scorer_of(scorer: Any, known: Mapping[str, str], is_offline: bool) -> Scorer:
    """The scorer of a request, as a callable.

    Args:
        scorer: The value of the option.
        known: URLs of the engine's scorers, by name.
        is_offline: Whether the user may make this process send requests to any URL.

    Raises:
        ValueError: it is not a scorer.
    """
    if isinstance(scorer, str):
        if scorer in known:
            return HttpStepScorer(known[scorer], scorer)
        if is_offline and scorer.startswith(("http://", "https://")):
            return HttpStepScorer(scorer)
        names = listed_option_names(known) or "none"
        raise ValueError(
            f"scorer={shown_option(scorer)} is not a scorer of this engine, which has: {names}; start it with "
            'additional_config={"trie_beam": {"scorers": {"prm": "http://host:8000/classify"}}}'
        )
    if isinstance(scorer, LLM):
        return PoolingStepScorer(scorer)
    if callable(scorer):
        return scorer
    raise ValueError(f"scorer={shown_option(scorer)} {NO_SCORER}")


@dataclass(frozen=True)
class PoolingStepScorer:
    """A pooling model in this process: a score is the last number that it returns for prompt and text.

    Raises:
        ValueError: the model returns embeddings, or is not a pooling model.
    """

    llm: LLM

    def __post_init__(self) -> None:
        task = self.llm.pooling_task
        if task not in ("classify", "token_classify"):
            raise ValueError(
                f"scorer={shown_option(self.llm)} is an LLM for {task or 'generate'!r}; pass one with a classifier or "
                'reward model, started with runner="pooling"'
            )

    def __call__(self, candidates: list[StepCandidate]) -> list[float]:
        tokenizer = self.llm.get_tokenizer()
        texts = [_step_text_begun_once(c.prompt + c.text_ahead, tokenizer) for c in candidates]
        outputs = self.llm.encode(texts, pooling_task=self.llm.pooling_task, use_tqdm=False)
        return [output.outputs.data.flatten()[-1].item() for output in outputs]


def _step_text_begun_once(text: str, tokenizer: Any) -> str:
    """Remove a leading BOS token that the tokenizer would add again, as the text of a chat already has it."""
    start: str = getattr(tokenizer, "bos_token", None) or ""
    is_added = text.startswith(start) and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
    return text.removeprefix(start) if is_added else text


@dataclass(frozen=True)
class HttpStepScorer:
    """An HTTP endpoint, called with one POST for all candidates of a round.

    A path that ends with /classify, /pooling or /score is taken for vLLM's, and the score is the last number that it
    returns for a candidate. Any other gets `{"candidates": [{"prompt", "text", "steps", "token_ids", "scores",
    "is_finished", "lookahead"}, ...]}` and returns `{"scores": [number, ...]}`.

    Args:
        url: Of the endpoint.
        name: The name that clients use. If there is one, errors tell clients neither the URL nor details.
    """

    url: str
    name: str | None = None

    def __call__(self, candidates: list[StepCandidate]) -> list[Any]:
        try:
            response = httpx.post(
                self.url, json=self.question(candidates), timeout=TIMEOUT, verify=_step_scorer_certificates()
            )
        except UNREACHABLE as error:
            raise self._unreachable(error) from None
        return self.values(response)

    async def ask(self, candidates: list[StepCandidate]) -> list[Any]:
        """Like calling it, but asynchronous."""
        async with httpx.AsyncClient(timeout=TIMEOUT, verify=_step_scorer_certificates()) as client:
            try:
                # A wide search's question has megabytes, which a thread encodes while the server goes on.
                response = await client.send(await asyncio.to_thread(self._request, client, candidates))
            except UNREACHABLE as error:
                raise self._unreachable(error) from None
        return self.values(response)

    def _request(self, client: httpx.AsyncClient, candidates: Sequence[StepCandidate]) -> httpx.Request:
        return client.build_request("POST", self.url, json=self.question(candidates))

    def _unreachable(self, error: Exception) -> ScorerError:
        return self._failed("cannot be reached", str(error) or type(error).__name__, UnreachableScorerError)

    def _failed(self, what: str, detail: str, kind: type[ScorerError] = ScorerError) -> ScorerError:
        if self.name is None:
            return kind(f"the scorer at {self.url} {what}: {detail}")
        logger.error("The scorer %s at %s %s: %s", self.name, self.url, what, detail)
        return kind(f"the scorer {self.name!r} {what}; the log of the engine's front end has details")

    @property
    def _endpoint(self) -> str:
        return urlsplit(self.url).path.rstrip("/").rpartition("/")[2]

    def question(self, candidates: Sequence[StepCandidate]) -> dict[str, Any]:
        """The body of the request."""
        if self._endpoint == "score":
            return {"text_1": [c.prompt for c in candidates], "text_2": [c.text_ahead for c in candidates]}
        if self._endpoint in ("classify", "pooling"):
            return {"input": [c.prompt + c.text_ahead for c in candidates]}
        return {"candidates": [{**vars(c), "text": c.text} for c in candidates]}

    def values(self, response: httpx.Response) -> list[Any]:
        """The scores in a response.

        Raises:
            ScorerError: it is an error, or has no scores.
        """
        if response.is_error:
            raise self._failed(f"answered {response.status_code}", response.text[:200])
        field = {"score": "score", "classify": "probs", "pooling": "data"}.get(self._endpoint)
        try:
            body = response.json()
            if field is None:
                return list(body["scores"])
            return [
                _last_step_score(of_candidate[field]) for of_candidate in sorted(body["data"], key=lambda d: d["index"])
            ]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise self._failed("answered without scores", f"{type(error).__name__}: {error}") from None


@cache
def _step_scorer_certificates() -> ssl.SSLContext:
    """The trusted certificates, read once, since that takes a tenth of a second."""
    return httpx.create_ssl_context()


def _last_step_score(value: Any) -> Any:
    """The last number of a value: a number, a list by class, or lists by token."""
    while isinstance(value, list):
        value = value[-1]
    return value
