"""Loads tokenizers of transformers, which is imported only then, and identifies their vocabularies."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def tokenizer_digest(tokenizer: Any) -> str:
    """Identify a tokenizer's vocabulary by 16 hex digits, equal if the same strings have the same ids."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def load_catalog_tokenizer(model: str) -> Any:
    """Load the tokenizer of a model: a folder, or a name on the Hugging Face Hub.

    Raises:
        ValueError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"--tokenizer={model} cannot be loaded: {str(error).splitlines()[0]}") from None
