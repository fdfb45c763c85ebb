"""Hooks by which features outside of the core handle requests and complete outputs.

Few requests use them. The first one that does loads the feature, by its name in a table here; the core imports none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Container, Iterator
from collections.abc import Set as AbstractSet
from functools import cache
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_trie.options import PLUGIN_NAME, StepOptions, options_ask_for_beams
from vllm_trie.options.request import kind_by_options
from vllm_trie.supported_engines import has_beams

Waiting = TypeVar("Waiting")
Engine = TypeVar("Engine", AsyncLLM, LLMEngine)
Hook = TypeVar("Hook")
Complete = Callable[[RequestOutput, dict[str, Any], Any], Iterator[None]]


class OfflineHook(ABC, Generic[Waiting]):
    """Handles all requests of one kind in one `LLMEngine`, each by means of other requests to the engine's core.

    It must hold no reference to the engine, which is its key in a weak dictionary.

    Attributes:
        waiting: State of each unanswered request, by an id of the hook.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, Waiting] = {}

    @abstractmethod
    def add_request(
        self,
        original: Callable[..., str],
        engine: LLMEngine,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        *args: Any,
        **kwargs: Any,
    ) -> str:
        """Accept a request; arguments and result are those of vLLM's `add_request`, which is `original`."""

    @abstractmethod
    def take(self, engine: LLMEngine, outputs: list[Any]) -> list[Any]:
        """Return what the engine's step returns in place of `outputs`. Called while requests are waiting."""

    @abstractmethod
    def abort(self, engine: LLMEngine, names: AbstractSet[str]) -> list[str]:
        """Forget requests with these ids: the hook's, the engine's, or those that users gave.

        Returns:
            Ids of requests that the engine must also abort.
        """

    @abstractmethod
    def num_more_outputs(self) -> int:
        """Outputs that users wait for minus those of the engine's requests; may be negative."""


class OnlineHook(ABC):
    """Handles all requests of one kind in one `AsyncLLM`; it must hold no reference to the engine."""

    @abstractmethod
    def generate(
        self,
        original: Callable[..., AsyncGenerator[RequestOutput, None]],
        engine: AsyncLLM,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request; arguments are those of vLLM's `generate`, which is `original`."""

    @abstractmethod
    def cancel(self, request_ids: Container[str] | None = None) -> None:
        """End the requests of these ids, or all."""


class OutputHooks(WeakKeyDictionary[Engine, dict[str, Hook]]):
    """The hooks of each engine, created by the first request that uses them.

    Args:
        classes: "module:class" of each kind, in the order in which hooks take outputs.
    """

    def __init__(self, classes: dict[str, str]) -> None:
        super().__init__()
        self._classes = classes

    def of_request(self, engine: Engine, params: Any) -> Hook | None:
        """The hook that handles a request with these parameters; None for most requests, which the engine handles."""
        if not isinstance(params, SamplingParams) or not (options := params.extra_args):
            return None
        for kind, place in self._classes.items():
            if _ASKS[kind](options) and has_beams(engine.vllm_config):
                hooks = self.get(engine, {})
                if kind not in hooks:
                    hooks = {**hooks, kind: resolve_name(place)()}
                    self[engine] = {of: hooks[of] for of in self._classes if of in hooks}
                return hooks[kind]
        return None


def _asks_reranking_hook(options: dict[str, Any]) -> bool:
    return options.get("rerank") is not None


def _asks_step_search_hook(options: dict[str, Any]) -> bool:
    return options_ask_for_beams(options) and kind_by_options(options) is StepOptions


_ASKS = {"reranking": _asks_reranking_hook, "step_search": _asks_step_search_hook}  # not whether it may
OFFLINE: OutputHooks[LLMEngine, OfflineHook[Any]] = OutputHooks(
    {
        "reranking": "vllm_trie.reranking.offline:Reranking",
        "step_search": "vllm_trie.step_search.offline:StepSearches",
    }
)
ONLINE: OutputHooks[AsyncLLM, OnlineHook] = OutputHooks({"step_search": "vllm_trie.step_search.online:StepSearches"})

COMPLETE = {  # fields of an answer that the engine sends in part -> the function that completes them
    "beam_results": "vllm_trie.entrypoints.answers.beam_results:complete_answer_beam_results",
    "trace": "vllm_trie.trace.texts:complete_trace",
}
_load: Callable[[str], Complete] = cache(resolve_name)


def completing_by_output_hooks(output: RequestOutput | PoolingRequestOutput | None, tokenizer: Any) -> Iterator[None]:
    """Complete the answer of a search; yields whenever other requests may get a turn.

    Args:
        output: Has `kv_transfer_params` only if the answer has more than hypotheses.
        tokenizer: The engine's, if it has one.
    """
    if not isinstance(output, RequestOutput) or output.kv_transfer_params is None:
        return
    answer = output.kv_transfer_params.get(PLUGIN_NAME, {})
    for field, place in COMPLETE.items():
        if field in answer:
            yield from _load(place)(output, answer, tokenizer)
