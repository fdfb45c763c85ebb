"""`vllm_trie.beam_params`: builds the `SamplingParams` of a beam search, by the table of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from inspect import Parameter, Signature, getdoc
from textwrap import fill
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np

from vllm_trie.compat.patch import wrap_vllm
from vllm_trie.entrypoints.requests.limits import check_request_n
from vllm_trie.options.request import OPTIONS, options_of_search, refuse_other_option_names
from vllm_trie.options.shown import shown_option, shown_option_name
from vllm_trie.options.table import cure_for_option, did_you_mean_option, option_meant_by
from vllm_trie.sampling_params import refuse_sampling_params

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


OBJECTS = {"scorer", "metric"}  # options that may be callables, which are not copied


def beam_params(beam_width: int | None = None, n: int = 1, **options: Any) -> SamplingParams:
    """Build the `SamplingParams` of a beam search. For an option that is None, the engine's default applies.

    Args:
        n: Hypotheses to return, best first; at most `beam_width`.
        **sampling_params: Further fields of vLLM's `SamplingParams`: `max_tokens`, `min_tokens`, `stop`,
            `stop_token_ids`, `ignore_eos`, `logprobs`, penalties, ...

    Raises:
        ValueError: an option is unknown, out of range, or not supported by beam search.
        ImportError: vLLM is not installed.
    """
    try:
        from vllm.sampling_params import SamplingParams
    except ImportError as error:
        raise ImportError("vLLM is not installed; pip install 'vllm_trie[gpu]' or 'vllm_trie[cpu]'") from error
    # Makes engines without beams refuse these params: they would sample.
    wrap_vllm("vllm_trie.entrypoints.requests.requests")
    options = {name: value.item() if isinstance(value, np.generic) else value for name, value in options.items()}
    own = {name: options.pop(name) for name in OPTIONS if name in options}
    _refuse_unknown_request_options(options, SamplingParams.__struct_fields__)
    beam = options_of_search({"beam_width": beam_width, **own})
    check_request_n(n, beam)
    extra_args = options.pop("extra_args", None) or {}
    for name in extra_args:
        if name in OPTIONS:
            raise ValueError(f"{name} is in extra_args; pass it as a separate argument")
    extra_args = {**extra_args, **beam.model_dump(exclude_unset=True, exclude_none=True, exclude=OBJECTS)}
    extra_args |= {name: own[name] for name in OBJECTS & own.keys()}
    try:
        params = SamplingParams(n=n, extra_args=extra_args, **options)
    except AssertionError:
        stop = shown_option(options.get("stop"))
        raise ValueError(f"stop={stop} is of the wrong type; pass a string or a list of strings") from None
    except TypeError:
        _refuse_wrong_request_types(options)
        raise
    _refuse_wrong_request_types({name: getattr(params, name) for name in options})
    refuse_sampling_params(params, beam)
    return params


def _refuse_unknown_request_options(options: Mapping[str, Any], fields: Sequence[str]) -> None:
    """Refuse options that are neither beam options nor fields of `SamplingParams`."""
    unknown = {name: value for name, value in options.items() if name not in fields}
    refuse_other_option_names(unknown)
    for name, value in unknown.items():
        meant = option_meant_by(name, fields, cutoff=0.6)
        what_works = did_you_mean_option(meant) if meant is not None else cure_for_option(name, OPTIONS)
        raise ValueError(f"unknown option {shown_option_name(name)}={shown_option(value)}; {what_works}")


def _refuse_wrong_request_types(fields: Mapping[str, Any]) -> None:
    """Refuse the first field that cannot be sent to an engine: one that fails to decode a request stops reading."""
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    types = _request_field_types()
    for name, value in fields.items():
        if name == "prompt_logprob_token_ids":  # which beams refuse; vLLM makes it an array later
            continue
        try:
            received = MsgpackDecoder(types[name]).decode(MsgpackEncoder().encode(value))
            if type(received).__module__ != "builtins" and not isinstance(value, type(received)):
                raise TypeError(f"Expected `{type(received).__name__}`, got `{type(value).__name__}`")
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"{name}={shown_option(value)} is of the wrong type: {shown_option_name(error)}") from None


@cache
def _request_field_types() -> dict[str, Any]:
    """The types of the fields of `SamplingParams`, by name."""
    from vllm.sampling_params import SamplingParams

    return get_type_hints(SamplingParams)


def _request_params_signature() -> Signature:
    """The signature of `beam_params`, with the options of the table."""
    width, n = (Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=int) for name in ("beam_width", "n"))
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
        for name, field in OPTIONS.items()
        if name != "beam_width"
    ]
    others = Parameter("sampling_params", Parameter.VAR_KEYWORD, annotation=Any)
    return Signature([width, n.replace(default=1), *options, others], return_annotation="SamplingParams")


def _request_params_docstring() -> str:
    """The docstring of `beam_params`, with the options of the table."""
    texts = (f"{name}: {field.description}" for name, field in OPTIONS.items())
    options = [fill(text, 120, initial_indent=" " * 4, subsequent_indent=" " * 8) for text in texts]
    return (getdoc(beam_params) or "").replace("Args:\n", "\n".join(["Args:", *options, ""]))


beam_params.__signature__, beam_params.__doc__ = _request_params_signature(), _request_params_docstring()  # type: ignore[attr-defined]
