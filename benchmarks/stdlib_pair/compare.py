"""Steps per forward by the head and by the draft model of the pair: `python -m benchmarks.stdlib_pair.compare`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from vllm import LLM

from benchmarks.stdlib_pair.corpus import held_out_prompts
from vllm_trie import beam_params

FOLDER = Path(__file__).parent
SOURCES = {"draft_model": FOLDER / "draft", "eagle3": FOLDER / "head"}
WIDTHS, DRAFTS_PER_BEAM, MAX_TOKENS = (1, 4, 8), (1, 2, 4), 48


def measure(method: str, model: Path, num_layers: int, num_prompts: int) -> list[tuple[Any, ...]]:
    """By width and drafts per beam: steps per forward, exact and sampled, and seconds of one exact search."""
    llm = LLM(
        str(FOLDER / "target"),
        additional_config={"trie_beam": {}},
        speculative_config={"method": method, "model": str(model), "num_speculative_tokens": num_layers},
        kv_cache_memory_bytes=1 << 28,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
    )
    prompts, rows = held_out_prompts(num_prompts), []
    for width, factor in ((width, factor) for width in WIDTHS for factor in DRAFTS_PER_BEAM):
        found = []
        for mode in ({"speculation": "exact"}, {"do_sample": True, "seed": 1}):
            params = beam_params(width, draft_width=factor * width, max_tokens=MAX_TOKENS, ignore_eos=True, **mode)
            start = time.perf_counter()
            outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
            seconds = (time.perf_counter() - start) / num_prompts
            counts = [output.kv_transfer_params["trie_beam"] for output in outputs]
            steps, forwards = (sum(of_one[name] for of_one in counts) for name in ("steps", "target_forwards"))
            found += [(steps - num_prompts) / (forwards - num_prompts), seconds]
        rows.append((method, width, factor * width, found[0], found[2], found[1]))
    llm.llm_engine.engine_core.shutdown()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4, help="of each forest")
    parser.add_argument("--prompts", type=int, default=16, help="held-out ones")
    parser.add_argument("--head", type=Path, default=SOURCES["eagle3"], help="folder of the head")
    args = parser.parse_args()
    sources = SOURCES | {"eagle3": args.head}
    rows = [row for method, model in sources.items() for row in measure(method, model, args.layers, args.prompts)]
    print("| drafts by | beams | draft width | steps per forward, exact | sampled | s per search, exact |")
    print("|---|---|---|---|---|---|")
    for method, width, drafts, exact, sampled, seconds in rows:
        print(f"| {method} | {width} | {drafts} | {exact:.2f} | {sampled:.2f} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
