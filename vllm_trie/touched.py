"""Every piece of vLLM that this plugin wraps, replaces, overrides or relies upon; `patches/touched.toml` says why."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

from vllm_trie.patching import RECORDS, Touched
from vllm_trie.worker.cpu.replace import replacements

_NO_TRITON = "Triton has no compiler for CPUs, unless triton-cpu is installed"
_CPU_KERNELS = "Model Runner V2 runs on CPUs without Triton (vllm-project/vllm#55847)"


def _on_file() -> Iterator[Touched]:
    for entry in tomllib.loads((RECORDS / "touched.toml").read_text())["touched"]:
        for target, why in entry["why"].items():
            yield Touched(target, entry["how"], why, entry["until"], entry.get("only_in", ""))


TOUCHED = (
    *_on_file(),
    *(
        Touched(target, f"replaced by {function.__module__}.{function.__name__}", _NO_TRITON, _CPU_KERNELS)
        for target, function in replacements().items()
    ),
)
