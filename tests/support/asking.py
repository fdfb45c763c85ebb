"""What tests of options share."""

from __future__ import annotations

import re
from typing import Any

import pytest

from vllm_trie import BeamParams
from vllm_trie.options import EngineOptions
from vllm_trie.options.resolve import resolve_options
from vllm_trie.options.speculation import Drafts


def resolved(options: dict[str, Any], drafts: Drafts | None = "model", **defaults: Any) -> BeamParams:
    return resolve_options(BeamParams(**{"beam_width": 4, **options}), EngineOptions(**defaults), drafts)


def refusal(text: str) -> Any:
    """A ValueError that says this, at the beginning."""
    return pytest.raises(ValueError, match="^" + re.escape(text))
