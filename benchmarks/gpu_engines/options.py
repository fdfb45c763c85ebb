"""What engines on a GPU are started with: the shapes of Qwen3 without weights, catalogs, prompts, options."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

VOCAB_SIZE, HEAD_SIZE, KV_HEADS, MAX_LENGTH = 151_936, 128, 8, 8192
SPARE_ROWS = 120  # besides those that a case has at a time
MEMORY_SHARE = 0.1  # of a GPU that must be free for an engine to start; its KV cache is given in bytes
GRAPHS_ALONE = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # without torch.compile
ITEMS, FIRST_CODE = 100_000, 1000  # of a catalog, and of its tokens
CATALOGS = {3: 256, 4: 8192}  # by length of the items: codes of each level
COMPUTED, CACHED = "computed", "cached"  # prompts that no call has had before, and one that all have


class Shape(NamedTuple):
    """The shape of a Qwen3."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    is_tied: bool


SHAPES = {
    "0.6B": Shape(1024, 28, 16, 3072, True),
    "1.7B": Shape(2048, 28, 16, 6144, True),
    "8B": Shape(4096, 36, 32, 12288, False),
    "tiny": Shape(64, 2, 2, 128, True),
}


def folder_of(name: str) -> Path:
    """Where a model is written: the same in each run, since vLLM compiles anew for another."""
    folder = Path(tempfile.gettempdir()) / f"vllm_trie_gpu_{os.getuid()}" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def seconds_left(args: argparse.Namespace, most: float) -> float:
    """Of the command's time, for something that takes at most so long; at least one."""
    return max(1.0, min(most, args.end - time.monotonic()))


def write_model(name: str, folder: Path) -> None:
    """A model's configuration, and no weights."""
    shape = SHAPES[name]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": min(KV_HEADS, shape.heads),
        "head_dim": HEAD_SIZE,
        "intermediate_size": shape.intermediate,
        "tie_word_embeddings": shape.is_tied,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def catalog_of(length: int) -> str:
    """What the engine calls its catalog of items of so many tokens."""
    return f"items_{length}"


def along_catalog(length: int) -> dict[str, Any]:
    """Options of a search along it, the fast way: of each level the logits of its codes alone are computed."""
    return {"catalog": catalog_of(length), "catalog_renormalize": True}


def write_catalogs(folder: Path) -> dict[str, str]:
    """By name: files of items, each level with tokens of its own."""
    from vllm_trie.catalog import Catalog

    files = {}
    for length, num_codes in CATALOGS.items():
        codes = np.random.default_rng(0).integers(0, num_codes, (ITEMS, length))
        path = folder / f"{catalog_of(length)}.catalog"
        path.write_bytes(Catalog.from_sequences((codes + FIRST_CODE + num_codes * np.arange(length)).tolist()).data)
        files[catalog_of(length)] = str(path)
    return files


def prompts_of(name: str, kind: str, length: int, count: int) -> Iterator[list[dict[str, Any]]]:
    """For each call of a case its prompts: other ones, or the same again."""
    choose = np.random.default_rng([*f"{name} {kind}".encode()])  # cases share no prompts

    def chosen() -> list[dict[str, Any]]:
        tokens = choose.integers(10, VOCAB_SIZE - 10, (count, length))
        return [{"prompt_token_ids": one} for one in tokens.tolist()]

    if kind == CACHED:
        yield from repeat(chosen())
    while True:
        yield chosen()


def engine_options(model: str, num_rows: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `LLM` for a model, which is written to a folder, and for so many rows at a time."""
    write_model(model, folder)
    max_length = 256 if args.rehearse else MAX_LENGTH
    most_rows = num_rows + SPARE_ROWS
    beams = {
        "catalogs": write_catalogs(folder),
        "max_beam_width": num_rows,  # up to which steps replay CUDA graphs
        "shared_prefix_attention": args.shared_prefix_attention,
    }
    return {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": max_length,
        "max_num_seqs": most_rows,
        "max_num_batched_tokens": max(2 * most_rows, max_length),
        "block_size": 32 if args.rehearse else 16,
        "enforce_eager": args.rehearse,
        "gpu_memory_utilization": MEMORY_SHARE,
        "kv_cache_memory_bytes": (1 if args.rehearse else args.kv_cache_gib) << 30,
        "compilation_config": GRAPHS_ALONE if args.no_compile else None,
        "additional_config": {"trie_beam": beams},
    }


def as_flags(options: dict[str, Any]) -> list[str]:
    """The same for `vllm serve`."""
    flags = list[str]()
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags
