"""Imported, lets Triton's interpreter replace once what kernels call of its language, and leave it replaced.

Triton does it anew for each launch, and for each call of one function by another, and looks through the whole language
each time: two fifths of the time that interpreted kernels take.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_replace, _replaced = interpreter._patch_lang, set[str]()


def _replace_once(function: Any) -> Any:
    """Nothing to restore. A function sees the language as a whole, or its core, as those of the language itself do."""
    values = function.__globals__.values()
    seen = {lang.__name__ for lang in (tl, tl.core) if any(value is lang for value in values)}
    if not seen <= _replaced:
        _replace(function)
        _replaced.update(seen)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _replace_once
