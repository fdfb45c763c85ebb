"""What `beam_params` refuses."""

from __future__ import annotations

import pytest

from vllm_trie import beam_params


def test_what_would_be_said_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="n=2 is not supported together with compact"):
        beam_params(4, n=2, compact=True)
    with pytest.raises(ValueError, match="logprobs=3 is not supported together with compact"):
        beam_params(4, logprobs=3, compact=True)
