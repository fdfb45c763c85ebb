"""Scorers of steps: a callable, vLLM's `LLM` of a pooling model, or an HTTP endpoint."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import httpx
from vllm import LLM
from vllm.logger import init_logger

from vllm_trie.options.parts import NO_SCORER
from vllm_trie.options.shown import listed_option_names, shown_option
from vllm_trie.step_search.scores import ScorerError

logger = init_logger("vllm.trie_beam.scorers")

TIMEOUT = 600.0  # seconds that an endpoint may take for the candidates of a round


@dataclass(frozen=True)
class StepCandidate:
    """What a scorer sees of a candidate: its text so far, and the step that is new.

    Args:
        prompt: The text of the prompt.
        steps: The text of each step.
        token_ids: Of all steps, one after the other.
        scores: What the scorer said after each earlier step.
        is_finished: Whether it cannot go on.
        lookahead: What the model would write next, greedily, as far as the request's `lookahead` goes.
    """

    prompt: str
    steps: tuple[str, ...]
    token_ids: tuple[int, ...]
    scores: tuple[float, ...]
    is_finished: bool
    lookahead: str = ""

    @property
    def text(self) -> str:
        """All steps."""
        return "".join(self.steps)

    @property
    def text_ahead(self) -> str:
        """All steps and the lookahead: what a scorer of texts judges."""
        return self.text + self.lookahead


Scorer: TypeAlias = Callable[[list[StepCandidate]], Iterable[Any]]  # a number for each, the higher the better


def step_scorer_of(scorer: Any, known: Mapping[str, str], is_offline: bool) -> Scorer:
    """The scorer that a request means.

    Args:
        scorer: Its option.
        known: URLs of the engine's scorers, by name.
        is_offline: Whether who asks may let this process send requests to anywhere.

    Raises:
        ValueError: it is none.
    """
    if isinstance(scorer, str):
        if scorer in known:
            return HttpStepScorer(known[scorer], scorer)
        if is_offline and scorer.startswith(("http://", "https://")):
            return HttpStepScorer(scorer)
        names = listed_option_names(known) or "none"
        raise ValueError(
            f"scorer={shown_option(scorer)} is no scorer of this engine, which knows: {names}; start it with "
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
        ValueError: the model returns embeddings, or is none for pooling.
    """

    llm: LLM

    def __post_init__(self) -> None:
        task = self.llm.pooling_task
        if task not in ("classify", "token_classify"):
            raise ValueError(
                f"scorer={shown_option(self.llm)} is an LLM for {task or 'generate'!r}; pass one of a classifier "
                "or reward "
                'model, started with runner="pooling"'
            )

    def __call__(self, candidates: list[StepCandidate]) -> list[float]:
        tokenizer = self.llm.get_tokenizer()
        texts = [_step_text_begun_once(c.prompt + c.text_ahead, tokenizer) for c in candidates]
        outputs = self.llm.encode(texts, pooling_task=self.llm.pooling_task, use_tqdm=False)
        return [output.outputs.data.flatten()[-1].item() for output in outputs]


def _step_text_begun_once(text: str, tokenizer: Any) -> str:
    """The text without its first token where the tokenizer adds this token: a chat's text has it already."""
    start: str = getattr(tokenizer, "bos_token", None) or ""
    is_added = text.startswith(start) and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
    return text.removeprefix(start) if is_added else text


@dataclass(frozen=True)
class HttpStepScorer:
    """An endpoint: one POST for all candidates of a round.

    Where the path ends with /classify, /pooling or /score, it is one of vLLM's, and the score the last number that it
    returns for a candidate. Any other gets `{"candidates": [{"prompt", "text", "steps", "token_ids", "scores",
    "is_finished", "lookahead"}, ...]}` and returns `{"scores": [number, ...]}`.

    Args:
        url: Where it is.
        name: What the engine's clients call it, who hear of nothing else when it fails.
    """

    url: str
    name: str | None = None

    def __call__(self, candidates: list[StepCandidate]) -> list[Any]:
        try:
            response = httpx.post(self.url, json=self.question(candidates), timeout=TIMEOUT)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        return self.values(response)

    async def ask(self, candidates: list[StepCandidate]) -> list[Any]:
        """The same where other requests go on meanwhile."""
        async with httpx.AsyncClient(timeout=TIMEOUT, verify=_step_scorer_certificates()) as client:
            try:
                response = await client.post(self.url, json=self.question(candidates))
            except httpx.HTTPError as error:
                raise self._unreachable(error) from None
        return self.values(response)

    def _unreachable(self, error: httpx.HTTPError) -> ScorerError:
        return self._failed("cannot be reached", str(error) or type(error).__name__)

    def _failed(self, what: str, detail: str) -> ScorerError:
        if self.name is None:
            return ScorerError(f"the scorer at {self.url} {what}: {detail}")
        logger.error("The scorer %s at %s %s: %s", self.name, self.url, what, detail)
        return ScorerError(f"the scorer {self.name!r} {what}; the log of the engine's front end says more")

    @property
    def _endpoint(self) -> str:
        return urlsplit(self.url).path.rstrip("/").rpartition("/")[2]

    def question(self, candidates: Sequence[StepCandidate]) -> dict[str, Any]:
        """The body of the request."""
        if self._endpoint == "score":
            return {"text_1": [c.prompt for c in candidates], "text_2": [c.text_ahead for c in candidates]}
        if self._endpoint in ("classify", "pooling"):
            return {"input": [c.prompt + c.text_ahead for c in candidates]}
        return {"candidates": [{**asdict(c), "text": c.text} for c in candidates]}

    def values(self, response: httpx.Response) -> list[Any]:
        """The scores among what came back.

        Raises:
            ScorerError: there are none.
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
    """Whom to trust: read once, as that takes a tenth of a second, in which nothing else is served."""
    return httpx.create_ssl_context()


def _last_step_score(value: Any) -> Any:
    """Of one number, of classes, or of classes by token."""
    while isinstance(value, list):
        value = value[-1]
    return value
