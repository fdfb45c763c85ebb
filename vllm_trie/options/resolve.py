"""Combines the options of a request with the defaults of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_trie.options.engine import EngineOptions
from vllm_trie.options.matrix import OF_HF, options_refusal, refuse_options
from vllm_trie.options.parts import Sampling, Speculating
from vllm_trie.options.request import BeamParams
from vllm_trie.options.speculation import (
    Drafts,
    check_drafts_for_options,
    check_threshold_option,
    fit_layer_width_options,
    options_sample_beams,
    resolve_speculation_options,
)


def resolve_options(
    beam: BeamParams, defaults: EngineOptions, drafts: Drafts | None, fields: Mapping[str, Any] | None = None
) -> BeamParams:
    """The options of a search, with the engine's defaults filled in.

    Args:
        beam: The request's options.
        defaults: The engine's options: each applies if the request does not set it and it does not clash with others.
        drafts: What the engine drafts by.
        fields: The request's fields of `SamplingParams` that differ from their defaults.

    Raises:
        ValueError: the request needs drafts that the engine lacks, clashes with the engine's semantics, or sets
            options of sampling or of layer widths that have no effect.
    """
    check_drafts_for_options(beam.speculation, drafts)
    request = {**(fields or {}), **beam.params()}
    request.setdefault("semantics", defaults.semantics if request.keys().isdisjoint(OF_HF) else "hf")
    refuse_options(request)  # first without defaults, so that refusals name what the request sets
    request["do_sample"] = options_sample_beams(request, defaults.do_sample, defaults.speculation)
    speculation, unused = resolve_speculation_options(request, defaults.speculation, drafts)
    request = {name: value for name, value in request.items() if name not in unused} | {"speculation": speculation}
    by_default = {name: getattr(defaults, name) for name in (*Sampling.model_fields, *Speculating.model_fields)}
    left = {name: value for name, value in by_default.items() if value is not None and getattr(beam, name) is None}
    chosen = {name: value for name, value in left.items() if options_refusal({**request, name: value}) is None}
    chosen |= {name: request[name] for name in ("semantics", "do_sample", "speculation")}
    fit_layer_width_options(chosen, beam, beam.beam_width)
    refuse_options(request | chosen)
    resolved = beam.model_copy(update=chosen | dict.fromkeys(unused))
    check_threshold_option(resolved)
    return resolved
