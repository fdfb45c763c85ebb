"""How the fields of a beam request's `SamplingParams` act on a search, and which are refused."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from vllm_trie.options.matrix import FIELDS, refuse_options
from vllm_trie.options.request import OPTIONS, SearchParams
from vllm_trie.search.filters import SearchFilters

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

# Fields by which vLLM's sampler changes the logits of each hypothesis, unless they are zero or empty.
_CONTROLS = ("presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words")


def sampling_params_stops(params: SamplingParams) -> tuple[int, ...]:
    """The tokens that end a hypothesis, ascending: EOS unless `ignore_eos`, and `stop_token_ids`."""
    tokens = set(params.stop_token_ids or ())
    if params.eos_token_id is not None:
        tokens.add(params.eos_token_id)
    return tuple(sorted(tokens))


def sampling_params_ignored_stops(params: SamplingParams) -> tuple[int, ...]:
    """The tokens that end nothing but that vLLM bars before `min_tokens`, ascending: an ignored EOS."""
    return tuple(sorted(params.all_stop_token_ids - {*sampling_params_stops(params)})) if params.min_tokens else ()


def sampling_params_control_logits(params: SamplingParams) -> bool:
    """Whether penalties, biases or bans act on the logits."""
    return params.repetition_penalty != 1.0 or any(getattr(params, name) for name in _CONTROLS)


def sampling_params_filters(params: SamplingParams) -> SearchFilters:
    """Temperature and filters of each row. `temperature=0.0`, which means no sampling, does not scale."""
    return SearchFilters(params.temperature or 1.0, params.min_p, max(params.top_k, 0), params.top_p)


def sampling_params_have_grammar(params: SamplingParams) -> bool:
    """Whether structured outputs constrain hypotheses."""
    return params.structured_outputs is not None and not params.structured_outputs.all_constraints_none()


def _sampling_params_matrix_fields(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults, of those that clash with some option."""
    fields = dict[str, Any]()
    for name, default in _sampling_params_defaults().items():
        value = getattr(params, name)
        if value is not None and (default is None or value != default):  # it may be an array
            fields[name] = value
    if not sampling_params_have_grammar(params):
        fields.pop("structured_outputs", None)
    if "output_kind" in fields:
        fields["output_kind"] = params.output_kind.name
    return fields


@cache
def _sampling_params_defaults() -> dict[str, Any]:
    from vllm.sampling_params import SamplingParams

    plain = SamplingParams()
    return {name: getattr(plain, name) for name in sorted(FIELDS - OPTIONS.keys())}


def refuse_sampling_params(params: SamplingParams, beam: SearchParams, feature: str = "beam_width") -> dict[str, Any]:
    """Refuse fields of `SamplingParams` that clash with options of this search.

    Args:
        feature: The user's name for the search.

    Returns:
        The fields that differ from their defaults, of those that clash with some option.

    Raises:
        ValueError: names the field, its value and what would work.
    """
    fields = _sampling_params_matrix_fields(params)
    refuse_options({**fields, **beam.params(), "beam_width": feature})
    return fields
