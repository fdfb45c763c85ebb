"""What a request and its engine say together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_trie.options.engine import TrieBeamConfig
from vllm_trie.options.matrix import OF_HF, clash, refusal
from vllm_trie.options.parts import Drawing, Speculating, Speculation
from vllm_trie.options.request import BeamParams
from vllm_trie.options.speculation import Drafts, check_drafts


def resolve(
    beam: BeamParams, defaults: TrieBeamConfig, drafts: Drafts | None, fields: Mapping[str, Any] | None = None
) -> BeamParams:
    """What a request and its engine together ask for.

    Args:
        beam: What the request asks for.
        defaults: What the engine says: it counts where the request says nothing, and nothing that it does not go with.
        drafts: What the engine drafts by.
        fields: What else the request asks for, in fields of `SamplingParams`.

    Raises:
        ValueError: the request wants drafts that there are none of, or says how to draw, or how wide layers are,
            where nothing is drawn or decides it.
    """
    check_drafts(beam.speculation, drafts)
    asked = {**(fields or {}), **beam.said()}
    semantics = beam.semantics or ("hf" if not asked.keys().isdisjoint(OF_HF) else defaults.semantics)
    beam.model_copy(update={"semantics": semantics}).check()  # a refusal names what the request says
    asked["semantics"] = semantics
    do_sample, speculation = beam.do_sample, beam.speculation
    if speculation in ("exact", "sample"):
        do_sample = speculation == "sample"
    elif do_sample is None:
        draws = bool(defaults.do_sample) or defaults.speculation == "sample"
        do_sample = draws and clash({**asked, "do_sample": True}) is None
    if speculation in (None, "auto"):
        wanted = speculation or defaults.speculation
        has_drafts = drafts == "model" or (drafts == "ngrams" and not do_sample)
        of_best: Speculation = "exact" if wanted == "exact" or drafts == "ngrams" else "auto"
        drafted: Speculation = "sample" if do_sample else "exact"
        is_on = has_drafts and wanted != "off" and clash({**asked, "speculation": drafted}) is None
        speculation = ("sample" if do_sample else of_best) if is_on else "off"
    asked |= {"do_sample": do_sample, "speculation": speculation}
    says = {name: getattr(defaults, name) for name in (*Drawing.model_fields, *Speculating.model_fields)}
    left = {name: value for name, value in says.items() if value is not None and getattr(beam, name) is None}
    chosen = {name: value for name, value in left.items() if refusal({**asked, name: value}) is None}
    if chosen.get("draft_width") is not None:
        chosen["draft_width"] = max(chosen["draft_width"], beam.beam_width)
    if chosen.get("min_width") is not None:
        chosen["min_width"] = min(chosen["min_width"], beam.beam_width)
    if chosen.get("threshold", beam.threshold) is None:
        chosen.pop("min_width", None)
    chosen |= {"semantics": semantics, "do_sample": do_sample, "speculation": speculation}
    resolved = beam.model_copy(update=chosen)
    resolved.check()
    if resolved.min_width is not None and resolved.threshold is None:
        raise ValueError(f"min_width={resolved.min_width} needs a threshold, such as 0.7, to decide the width by")
    return resolved
