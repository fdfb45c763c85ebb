"""Write a Whisper of CTranslate2 as transformers saves one.

The binary's form is that of CTranslate2's `ModelSpec` (version 6): a header, then each variable with its name, shape,
type and values. CTranslate2 fuses projections of attention, which are taken apart again.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AddedToken,
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
NAMES = {  # by pattern of CTranslate2's, transformers'
    "/": ".",
    r"layer_norm\.gamma": "layer_norm.weight",
    r"layer_norm\.beta": "layer_norm.bias",
    r"layer_(\d)": r"layers.\1",
    r"self_attention\.layer_norm": "self_attn_layer_norm",
    "self_attention": "self_attn",
    r"(layers.\d)\.attention\.layer_norm": r"\1.encoder_attn_layer_norm",
    r"(layers.\d)\.attention": r"\1.encoder_attn",
    r"ffn\.layer_norm": "final_layer_norm",
    r"ffn\.linear_0": "fc1",
    r"ffn\.linear_1": "fc2",
    r"^(\w+)\.layer_norm": r"\1.layer_norm",
    r"position_encodings\.encodings": "embed_positions.weight",
    r"embeddings\.weight": "embed_tokens.weight",
}
PROJECTIONS = {  # by linear layer of CTranslate2, those of transformers that are in it, one below the other
    "self_attn.linear_0": ("q_proj", "k_proj", "v_proj"),
    "self_attn.linear_1": ("out_proj",),
    "encoder_attn.linear_0": ("q_proj",),
    "encoder_attn.linear_1": ("k_proj", "v_proj"),
    "encoder_attn.linear_2": ("out_proj",),
}
SPECIAL = {"bos_token_id": 50257, "eos_token_id": 50257, "pad_token_id": 50257, "decoder_start_token_id": 50258}
TASKS = {"transcribe": 50359, "translate": 50358}
PREVIOUS, NO_TIMESTAMPS = 50361, 50363
LAST_TIMESTAMP, STEPS_PER_SECOND = 30, 50  # seconds; timestamps are tokens, too
MOST_TOKENS = 448
FIRST_MERGE = "Ġ t"


def convert(source: Path, folder: Path) -> None:
    """Save a model, its generation configuration, tokenizer and feature extractor.

    Args:
        source: Folder of CTranslate2's model.
        folder: An existing one.
    """
    weights = dict(_weights(_variables((source / "model.bin").read_bytes())))
    weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]
    sizes = {f"{side}_layers": 6 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_attention_heads": 8 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 2048 for side in ("encoder", "decoder")}
    config = WhisperConfig(d_model=512, **sizes, **SPECIAL, suppress_tokens=None, begin_suppress_tokens=None)
    model = WhisperForConditionalGeneration(config).to(torch.float16)
    model.load_state_dict(weights)
    model.generation_config = _generation_config(source)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(_tokenizer(source))
    tokenizer = WhisperTokenizer.from_pretrained(folder)
    steps = range(LAST_TIMESTAMP * STEPS_PER_SECOND + 1)
    tokenizer.add_tokens([AddedToken(f"<|{step / STEPS_PER_SECOND:.2f}|>", normalized=False) for step in steps])
    assert len(tokenizer) == config.vocab_size
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor().save_pretrained(folder)


def _variables(binary: bytes) -> dict[str, np.ndarray]:
    """By name, the variables of a binary."""
    at, variables = 0, dict[str, np.ndarray]()

    def take(form: str) -> tuple[Any, ...]:
        nonlocal at
        values = struct.unpack_from(f"<{form}", binary, at)
        at += struct.calcsize(f"<{form}")
        return values

    def text() -> str:
        length = take("H")[0]
        return str(take(f"{length}s")[0].rstrip(b"\0").decode())

    take("I")  # the version of the form
    if (kind := text()) != "WhisperSpec":
        raise ValueError(f"a CTranslate2 model of the kind {kind}, not a Whisper")
    _, count = take("II")
    for _ in range(count):
        name, (rank,) = text(), take("B")
        shape, (number,), (size,) = take(f"{rank}I"), take("B"), take("I")
        values = np.frombuffer(binary, TYPES[number], size // np.dtype(TYPES[number]).itemsize, at)
        variables[name] = values.reshape(shape)
        at += size
    return variables


def _weights(variables: dict[str, np.ndarray]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, which are those in float16, named as in transformers."""
    for name, values in variables.items():
        if values.dtype != np.float16:
            continue
        for pattern, replacement in NAMES.items():
            name = re.sub(pattern, replacement, name)
        fused = next((linear for linear in PROJECTIONS if linear in name), None)
        if fused is None:
            yield f"model.{name}", torch.tensor(values)
            continue
        parts, layer = PROJECTIONS[fused], fused.split(".")[1]
        for part, own in zip(parts, np.split(values, len(parts)), strict=True):
            if (part, name.rsplit(".")[-1]) == ("k_proj", "bias"):
                assert not own.any(), "keys of a Whisper have no bias"
            else:
                yield f"model.{name.replace(layer, part)}", torch.tensor(own)


def _tokenizer(source: Path) -> str:
    """Its file, with the first merge, which the file lacks: without it " there" would be two tokens."""
    content = json.loads((source / "tokenizer.json").read_text())
    assert content["model"]["merges"][0] == "Ġ a", "the file has the merge that is added here"
    content["model"]["merges"].insert(0, FIRST_MERGE)
    return json.dumps(content)


def _generation_config(source: Path) -> GenerationConfig:
    """Languages, tasks, timestamps, and the tokens that `generate` suppresses."""
    about = json.loads((source / "config.json").read_text())
    tokens = (source / "vocabulary.txt").read_text().split("\n")
    return GenerationConfig(
        **SPECIAL,
        alignment_heads=about["alignment_heads"],
        suppress_tokens=about["suppress_ids"],
        begin_suppress_tokens=about["suppress_ids_begin"],
        is_multilingual=True,
        lang_to_id={tokens[number]: number for number in about["lang_ids"]},
        task_to_id=TASKS,
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=PREVIOUS,
        max_initial_timestamp_index=STEPS_PER_SECOND,
        max_length=MOST_TOKENS,
        return_timestamps=False,
    )
