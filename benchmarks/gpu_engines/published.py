"""What peers publish of the cases that are measured here, with the device that each of them had."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """Two cells of a table.

    Args:
        figures: By peer, in the unit of the table unless they name another.
        device: On which they were measured.
    """

    figures: str = "-"
    device: str = "-"


COLUMNS = ("peers publish", "on")
NOTHING = Published()
H100, H200, RTX = "H100", "H200", "RTX 5090"
SOURCES = (
    f"{H100}: README of sid-gr-inference in NVIDIA/recsys-examples, Qwen3-1.7B, bfloat16, on the open vocabulary, "
    "SGLang by a branch; "
    f"{RTX}: docs/baselines of sohu-mptc/FlashRec, OneRec-1.7B, over HTTP, at most 5 tokens, FlashRec in FP8 along a "
    "catalog of 1.52 million items (ours: 4 tokens, 100,000 items), others on the open vocabulary, SGLang by a branch; "
    f"{H200}: SGLang's pull request of beam_width, Qwen3-0.6B, bfloat16, means of whole HTTP calls, several at a time, "
    "how many and the length of prompts not given"
)

ONE_OF_256 = Published("sid-gr 17.6, SGLang 33.5", H100)
EIGHT_OF_256 = Published("sid-gr 308, SGLang 685", H100)
ONE_OF_50 = Published("FlashRec 15.1/s, SGLang 12.4/s, TensorRT-LLM 11.6/s, vLLM 2.47/s", RTX)
ONE_OF_1000 = Published("FlashRec 4.38/s, SGLang 3.03/s", RTX)
OF_5000 = {  # by tokens
    3: Published("SGLang 259", H200),
    16: Published("SGLang 904", H200),
    32: Published("SGLang 1,651", H200),
}
SERVED_256 = Published("sid-gr 19.4 to 20.1, SGLang 10.7", H100)  # of 4 clients
SERVED_50 = {  # by clients
    1: Published("FlashRec 15.1, SGLang 12.4, TensorRT-LLM 11.6, vLLM 2.47", RTX),
    16: Published("FlashRec 27.7, SGLang 18.0, TensorRT-LLM 12.7, vLLM 3.89", RTX),
    32: Published("FlashRec 28.1, SGLang 18.2, TensorRT-LLM 12.7, vLLM 3.78", RTX),
}
