"""What a request and its engine say together."""

from __future__ import annotations

from vllm_trie.options.engine import TrieBeamConfig
from vllm_trie.options.request import BeamParams, that_go_with
from vllm_trie.options.speculation import Drafts, Speculation, check_drafts
from vllm_trie.options.table import BEST_OF_HF, DRAFTS, DRAWN, DRAWN_DRAFTS, PLAIN


def resolve(beam: BeamParams, defaults: TrieBeamConfig, drafts: Drafts | None, is_greedy: bool = False) -> BeamParams:
    """What a request and its engine together ask for.

    Args:
        beam: What the request asks for.
        defaults: What the engine says. Where its word to draw meets a search that cannot, that search remains what
            it is.
        drafts: What the engine drafts by.
        is_greedy: Whether the request's temperature of 0 leaves nothing to draw.

    Raises:
        ValueError: the request wants drafts that there are none of, or says how to draw, or how wide layers are,
            where nothing is drawn or decides it.
    """
    check_drafts(beam.speculation, drafts)
    is_best_of_hf = bool(beam.asks_for(BEST_OF_HF))
    semantics = beam.semantics or ("hf" if is_best_of_hf else defaults.semantics)
    beam.model_copy(update={"semantics": semantics}).check_together()  # a refusal names what the request says
    do_sample, speculation = beam.do_sample, beam.speculation
    if speculation in ("exact", "sample"):
        do_sample = speculation == "sample"
    elif do_sample is None:
        may_draw = semantics == "hf" and not (is_greedy or beam.asks_for(PLAIN) or is_best_of_hf)
        do_sample = may_draw and (bool(defaults.do_sample) or defaults.speculation == "sample")
    if speculation in (None, "auto"):
        wanted = speculation or defaults.speculation
        has_drafts = drafts == "model" or (drafts == "ngrams" and not do_sample)
        is_on = has_drafts and wanted != "off" and beam.beam_widths is None and beam.num_beam_groups == 1
        is_on = is_on and not beam.stochastic
        of_best: Speculation = "exact" if wanted == "exact" or drafts == "ngrams" else "auto"
        speculation = ("sample" if do_sample else of_best) if is_on else "off"
    acting = (
        [DRAWN] * (do_sample and not beam.stochastic)
        + [DRAFTS] * (speculation != "off")
        + [DRAWN_DRAFTS] * (speculation == "sample")
    )
    chosen = {name: getattr(defaults, name) for name in that_go_with(*acting) if getattr(beam, name) is None}
    if chosen.get("draft_width") is not None:
        chosen["draft_width"] = max(chosen["draft_width"], beam.beam_width)
    if chosen.get("min_width") is not None:
        chosen["min_width"] = min(chosen["min_width"], beam.beam_width)
    if chosen.get("threshold", beam.threshold) is None:
        chosen.pop("min_width", None)
    chosen |= {"semantics": semantics, "do_sample": do_sample, "speculation": speculation}
    resolved = beam.model_copy(update=chosen)
    resolved.check_together()
    if resolved.min_width is not None and resolved.threshold is None:
        raise ValueError(f"min_width={resolved.min_width} needs a threshold, such as 0.7, to decide the width by")
    return resolved
