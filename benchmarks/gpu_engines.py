"""Engines on a GPU: models with the shapes of Qwen3 and weights without content, in bfloat16 and with CUDA graphs.

    python -m benchmarks.gpu_engines --model 8B

What a step costs depends on shapes, not on what the weights say. Every case is timed after a run that warms it up, and
its median is told. Where SGLang is installed, it runs its own beams of the same shapes, in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import alternate, generate
from benchmarks.gpu_tables import tell, write

VOCAB_SIZE, HEAD_SIZE, KV_HEADS, MAX_LENGTH = 151_936, 128, 8, 8192
ITEMS, ITEM_LENGTH, NUM_CODES = 100_000, 3, 256  # of a catalog
WIDEST = 5000
COLUMNS = ("engine", "case", "ms", "tokens of rows per second", "times sampling")
NOTE = (
    "bfloat16, weights without content, CUDA graphs, prompts in the prefix cache; ms: a call of LLM.generate, the "
    "median, in turn with sampling: n requests of temperature 1 in place of n beams"
)
OF_DRAFTS = "; hardly any draft is accepted, so this is what they cost"


class Model(NamedTuple):
    """The shape of a Qwen3."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    is_tied: bool


MODELS = {
    "0.6B": Model(1024, 28, 16, 3072, True),
    "1.7B": Model(2048, 28, 16, 6144, True),
    "8B": Model(4096, 36, 32, 12288, False),
}
TINY = Model(64, 2, 2, 128, True)


class Case(NamedTuple):
    """Searches at a time, on prompts of so many tokens, each of so many beams and tokens."""

    width: int
    num_tokens: int
    prompt_length: int = 1000
    num_prompts: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        others = "".join(f", {key}={value}" for key, value in self.options)
        return f"{self.width} beams x {self.num_prompts}, {self.num_tokens} tokens after {self.prompt_length}{others}"


CATALOG_FILE = "items.catalog"
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
GRAPHS_ALONE = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # without torch.compile
CATALOG, LOOKUP = (("catalog", "items"),), (("speculation", "exact"),)
CASES = (
    *(Case(width, 64) for width in (4, 16, 64)),
    Case(512, 16),
    Case(4, 64, num_prompts=8),
    Case(256, ITEM_LENGTH, 1000, options=CATALOG),
    Case(50, ITEM_LENGTH, 2465, options=CATALOG),
    *(Case(width, 16, 4000) for width in (64, 128, 512)),
    Case(256, ITEM_LENGTH, 5000, 8, CATALOG),
    *(Case(WIDEST, tokens) for tokens in (3, 16, 32)),
    Case(4, 64, options=LOOKUP),
)
SMALL_CASES = (Case(3, 4, 40), Case(3, ITEM_LENGTH, 40, 2, CATALOG), Case(3, 8, 40, options=LOOKUP))


def write_config(model: Model, folder: Path) -> Path:
    """A folder that holds a model's configuration, and no weights."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": min(KV_HEADS, model.heads),
        "head_dim": HEAD_SIZE,
        "intermediate_size": model.intermediate,
        "tie_word_embeddings": model.is_tied,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_catalog(path: Path) -> None:
    """Items of a few codes, each level with tokens of its own."""
    from vllm_trie.catalog import Catalog

    codes = np.random.default_rng(0).integers(0, NUM_CODES, (ITEMS, ITEM_LENGTH))
    levels = 1000 + NUM_CODES * np.arange(ITEM_LENGTH)
    path.write_bytes(Catalog.from_sequences((codes + levels).tolist()).data)


def engine(folder: Path, args: argparse.Namespace) -> Any:
    """An engine with beams, and with drafts by n-grams, if it shall have these."""
    from vllm import LLM

    most = 64 if args.rehearse else args.most_beams + 120
    return LLM(
        str(folder),
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=256 if args.rehearse else MAX_LENGTH,
        max_num_seqs=most,
        max_num_batched_tokens=2 * max(most, 256),
        enforce_eager=args.rehearse,
        kv_cache_memory_bytes=args.kv_cache_gib << 30,
        compilation_config=GRAPHS_ALONE if args.no_compile else None,
        speculative_config=NGRAMS if args.drafts else None,
        additional_config={
            "trie_beam": {
                "catalogs": {"items": str(folder / CATALOG_FILE)},
                "shared_prefix_attention": args.shared_prefix_attention,
            }
        },
    )


def runs_of(llm: Any, case: Case) -> dict[str, Callable[[], Any]]:
    """Beams, and as many samples."""
    from vllm import SamplingParams

    from vllm_trie import beam_params

    choose = np.random.default_rng(case.prompt_length)
    prompts = [
        {"prompt_token_ids": choose.integers(10, VOCAB_SIZE - 10, case.prompt_length).tolist()}
        for _ in range(case.num_prompts)
    ]
    common = {"max_tokens": case.num_tokens, "n": case.width, "detokenize": False}
    ends = {} if "catalog" in dict(case.options) else {"ignore_eos": True}
    beams = beam_params(case.width, **common, **ends, **dict(case.options))
    sampling = SamplingParams(temperature=1.0, ignore_eos=True, **common)
    return {"beams": lambda: generate(llm, prompts, beams), "sampling": lambda: generate(llm, prompts, sampling)}


def measured(llm: Any, case: Case, repeats: int) -> tuple[Any, ...]:
    """A row of `COLUMNS`."""
    seconds = {kind: statistics.median(times) for kind, times in alternate(runs_of(llm, case), repeats).items()}
    per_second = case.width * case.num_prompts * case.num_tokens / seconds["beams"]
    row = "vllm_trie", case.name, 1000 * seconds["beams"], per_second, seconds["beams"] / seconds["sampling"]
    print(row, flush=True)
    return row


def by_sglang(folder: Path, case: Case, repeats: int) -> tuple[Any, ...]:
    """A row of SGLang's own beams, in a process of its own."""
    command = [sys.executable, "-c", SGLANG, str(folder), json.dumps(case._asdict()), str(repeats), str(VOCAB_SIZE)]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return "SGLang", case.name, float(found.stdout.strip().splitlines()[-1]), "-", "-"


SGLANG = """
import json, random, statistics, sys, time
import sglang

if __name__ == "__main__":
    folder, case, repeats, vocab_size = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    engine = sglang.Engine(
        model_path=folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, enable_beam_search=True
    )
    tokens = range(10, vocab_size - 10)
    prompts = [random.choices(tokens, k=case["prompt_length"]) for _ in range(case["num_prompts"])]
    params = {"n": case["width"], "max_new_tokens": case["num_tokens"], "ignore_eos": True}
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params=params)
        seconds.append(time.perf_counter() - start)
    engine.shutdown()
    print(1000 * statistics.median(seconds[1:]))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_engines", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="0.6B")
    parser.add_argument("--drafts", action="store_true", help="an engine that drafts by n-grams, and its cases")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--most-beams", type=int, default=WIDEST, help="at a time; cases of more are left out")
    parser.add_argument("--no-compile", action="store_true", help="CUDA graphs without torch.compile: a shorter start")
    parser.add_argument("--kv-cache-gib", type=int, default=40)
    parser.add_argument("--shared-prefix-attention", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--rehearse", action="store_true", help="on any machine, with a tiny model and small cases")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the JSON file")
    args = parser.parse_args(arguments)
    cases = [case for case in (SMALL_CASES if args.rehearse else CASES) if (case.options == LOOKUP) == args.drafts]
    cases = [case for case in cases if case.width * case.num_prompts <= args.most_beams]
    name, rows, failures = "tiny" if args.rehearse else args.model, list[tuple[Any, ...]](), 0
    ways = {
        "drafts": ("drafts by n-grams", args.drafts),
        "rows": ("each row reads", args.shared_prefix_attention == "off"),
        "uncompiled": ("without torch.compile", args.no_compile),
    }
    also = {key: told for key, (told, is_so) in ways.items() if is_so}
    title = ", ".join([f"Beams beside samples, {name}", *also.values()])
    table, note = ("_".join(["gpu_engines", name, *also]), title, COLUMNS), NOTE + (OF_DRAFTS if args.drafts else "")
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_config(TINY if args.rehearse else MODELS[name], Path(temporary))
        write_catalog(folder / CATALOG_FILE)
        llm = engine(folder, args)
        runs = [partial(measured, llm, case, args.repeats) for case in cases]
        del llm
        if find_spec("sglang") is not None and not args.rehearse:
            plain = [case for case in cases if not case.options]
            runs += [partial(by_sglang, folder, case, args.repeats) for case in plain]
        while runs:
            run = runs.pop(0)
            try:
                rows.append(run())
                write(*table, rows, note, args.out)  # what is measured stays if time runs out
            except Exception as error:
                failures += 1
                print(f"FAILED {run.args[1:]}: {type(error).__name__}: {error}", flush=True)
            del run
            gc.collect()
    tell(*table, rows, note, args.out)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
