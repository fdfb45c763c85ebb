"""The options and data of a beam request, read and checked as far as possible without its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import WeakKeyDictionary

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_trie.options import PLUGIN_NAME, BeamParams
from vllm_trie.search import search_part_on_demand
from vllm_trie.supported_engines import plugin_config_of

if TYPE_CHECKING:
    from vllm_trie.catalog import Catalog
    from vllm_trie.engine.catalog_exclusion import SentExclusion
    from vllm_trie.entrypoints.requests.item_sets import RequestItemSets
    from vllm_trie.entrypoints.requests.phrases import Boosts

READ = "trie_beam_read"  # key of a `RequestData` in `extra_args`; clients of a server cannot send one
REASONING = "trie_beam_reasoning"  # key of a `RequestReasoning` in `extra_args`
BRINGS = ("allowed_sequences", "phrase_boosts", "exclude_items")  # the options that may be large

_item_sets: WeakKeyDictionary[InputProcessor, RequestItemSets] = WeakKeyDictionary()  # by engine


class RequestReasoning(NamedTuple):
    """What a server knows of a request's reasoning; vLLM adds it to a request only after its checks.

    Args:
        has_ended: Whether it is over when the answer begins; None if the parser must look at the prompt.
        parser_kwargs: Of the reasoning parser.
    """

    has_ended: bool | None = None
    parser_kwargs: dict[str, Any] | None = None

    def noted(self, params: SamplingParams) -> SamplingParams:
        """A copy of the parameters from which `process_inputs` learns this."""
        params = copy(params)
        params.extra_args = {**(params.extra_args or {}), REASONING: self}
        return params


@dataclass(frozen=True)
class RequestData:
    """The options of a request's search, and the data that it brings."""

    beam: BeamParams
    phrases: Boosts | None = None  # as tokens
    item_set: Catalog | None = None
    exclusion: SentExclusion | None = None

    @property
    def has_items(self) -> bool:
        """Whether its hypotheses must be items of a catalog or of a set that it brings."""
        return any(along is not None for along in (self.beam.catalog, self.item_set))

    @property
    def num_bytes(self) -> dict[str, int]:
        """The most bytes that its data takes on each device, by option."""
        needed = {}
        if self.item_set is not None:
            needed["allowed_sequences"] = self.item_set.num_bytes_on_device
        if self.phrases is not None:
            most_constraint_bytes = search_part_on_demand("constraints.phrase_boosts:most_constraint_bytes")
            needed["phrase_boosts"] = most_constraint_bytes(way for ways, _ in self.phrases for way in ways)
        return needed

    def __deepcopy__(self, memo: Any) -> Self:
        """Return itself, as it is immutable: vLLM copies what users pass."""
        return self

    @classmethod
    def of(cls, params: SamplingParams) -> RequestData | None:
        """The data of a request that was read before, if any."""
        data = (params.extra_args or {}).get(READ)
        return data if isinstance(data, cls) else None

    def instead_of_texts(self, params: SamplingParams) -> SamplingParams:
        """The request with its data in place of the texts, which vLLM would traverse and copy."""
        extra_args = params.extra_args or {}
        if extra_args.keys().isdisjoint(BRINGS):
            return params
        params = copy(params)
        params.extra_args = {name: value for name, value in extra_args.items() if name not in BRINGS} | {READ: self}
        return params


def read_request_data(beam: BeamParams, processor: InputProcessor, tokenizer: Any) -> RequestData:
    """Read the data that a request brings.

    Args:
        beam: Its options.
        tokenizer: None if the engine has none.

    Raises:
        ValueError: names the option, its value and what would work.
    """
    phrases, item_set, exclusion = None, None, None
    if beam.phrase_boosts is not None:
        from vllm_trie.entrypoints.requests.phrases import request_phrases_as_tokens  # few requests bring anything

        phrases = request_phrases_as_tokens(beam.phrase_boosts, tokenizer)
    if beam.allowed_sequences is not None:
        from vllm_trie.entrypoints.requests.item_sets import RequestItemSets

        if (sets := _item_sets.get(processor)) is None:
            sets = _item_sets[processor] = RequestItemSets(processor.model_config.max_model_len)
        item_set = sets.read(beam.allowed_sequences, processor.model_config.get_vocab_size(), tokenizer)
    if beam.exclude_items is not None or beam.exclude_list is not None:
        from vllm_trie.entrypoints.requests.catalogs import sent_request_exclusion

        exclusion = sent_request_exclusion(beam, processor.vllm_config)
    data = RequestData(beam, phrases, item_set, exclusion)
    _refuse_request_without_room(data.num_bytes, plugin_config_of(processor.vllm_config).request_tables_bytes)
    return data


def check_request_data(data: RequestData, vocab_size: int, stops: Sequence[int]) -> None:
    """Refuse data that no hypothesis can contain.

    Args:
        stops: The request's stop tokens.

    Raises:
        ValueError: names the option and what would work.
    """
    if data.phrases is not None:
        from vllm_trie.entrypoints.requests.phrases import check_request_phrases

        check_request_phrases(data.beam.phrase_boosts or (), data.phrases, vocab_size, stops)


def _refuse_request_without_room(needed: dict[str, int], room: int) -> None:
    if sum(needed.values()) > room:
        raise ValueError(
            f"{' and '.join(needed)} may need {sum(needed.values()):,} bytes of each device, more than {PLUGIN_NAME}."
            f"request_tables_bytes={room:,}; leave some out, or raise request_tables_bytes"
        )
