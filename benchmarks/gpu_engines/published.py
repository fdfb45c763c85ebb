"""What peers publish of the cases that are measured here, with the device that each of them had."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """Two cells of a table.

    Args:
        figures: By peer, in the unit of the table unless they name another.
        source: Where they stand, and what they were measured on.
    """

    figures: str = "-"
    source: str = "-"


COLUMNS = ("peers publish", "where, and measured on what")
NOTHING = Published()

_SID_GR = (
    "README of sid-gr-inference in NVIDIA/recsys-examples: H100, Qwen3-1.7B, bfloat16; SGLang by a branch with beams"
)
_FLASHREC = (
    "docs/baselines of sohu-mptc/FlashRec: RTX 5090, OneRec-1.7B, over HTTP; FlashRec in FP8 along a catalog, the "
    "others on the open vocabulary, SGLang by a branch with beams"
)
_SGLANG = "SGLang's pull request of beam_width: H200, Qwen3-0.6B, bfloat16, means, length of prompts not given"

ONE_OF_256 = Published("sid-gr 17.6, SGLang 33.5", _SID_GR)
EIGHT_OF_256 = Published("sid-gr 308, SGLang 685", _SID_GR)
ONE_OF_50 = Published("FlashRec 15.1/s, SGLang 12.4/s, TensorRT-LLM 11.6/s, vLLM 2.47/s", _FLASHREC)
ONE_OF_1000 = Published("FlashRec 4.38/s, SGLang 3.03/s", _FLASHREC)
OF_5000 = {
    num_tokens: Published(f"SGLang {ms}", _SGLANG) for num_tokens, ms in ((3, "259"), (16, "904"), (32, "1,651"))
}
SERVED_256 = {4: Published("sid-gr 19.4 to 20.1, SGLang 10.7", _SID_GR)}  # by clients
SERVED_50 = {
    1: Published("FlashRec 15.1, SGLang 12.4, TensorRT-LLM 11.6, vLLM 2.47", _FLASHREC),
    16: Published("FlashRec 27.7, SGLang 18.0, TensorRT-LLM 12.7, vLLM 3.89", _FLASHREC),
    32: Published("FlashRec 28.1, SGLang 18.2, TensorRT-LLM 12.7, vLLM 3.78", _FLASHREC),
}
