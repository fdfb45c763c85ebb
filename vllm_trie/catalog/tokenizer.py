"""Tokenizers of transformers, which is imported where one is loaded, and not before."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def tokenizer_digest(tokenizer: Any) -> str:
    """Which vocabulary a tokenizer has: 16 hex digits, the same wherever the same strings have the same ids."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def load_catalog_tokenizer(model: str) -> Any:
    """The tokenizer of a model: a folder, or a name on the Hugging Face Hub.

    Raises:
        ValueError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"--tokenizer={model} cannot be loaded: {str(error).splitlines()[0]}") from None
