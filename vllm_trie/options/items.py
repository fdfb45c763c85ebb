"""What the options of catalogs come to."""

from __future__ import annotations

from vllm_trie.options.request import BeamParams


def num_beams_along(beam: BeamParams, num_items: int, num_stop_tokens: int) -> int:
    """How many beams can live along a catalog, at most `beam_width`: no two of a group are alike.

    Args:
        num_items: Of the catalog.
        num_stop_tokens: Under `catalog_stop` one of them follows the last item.
    """
    if beam.catalog_after is not None:
        return beam.beam_width
    exponent = min(beam.catalog_items, beam.beam_width.bit_length())  # with which 2 exceeds beam_width
    num_hypotheses = num_items**exponent * (num_stop_tokens if beam.catalog_stop else 1)
    return min(beam.beam_width, num_hypotheses * beam.num_beam_groups)
