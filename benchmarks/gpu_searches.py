"""Whole searches of a small trained model on a GPU, in float16, against transformers' in float32.

    python -m benchmarks.gpu_searches

Each way that an engine may go on a GPU: by CUDA graphs, with shared blocks read once, with drafts of a model along
trees, and with drafts by n-grams. Half precision ties what float32 tells apart, so most hypotheses must be the same,
not all. The exit status is 1 where fewer are.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import PAIR, TARGET, generate
from benchmarks.gpu_engines import GRAPHS_ALONE, NGRAMS
from benchmarks.gpu_tables import tell
from benchmarks.stdlib_pair.corpus import held_out_prompts

WIDTH, PROMPT_LENGTH, MAX_TOKENS = 5, 96, 32
LEAST_SAME, MOST_APART = 0.9, 0.25  # of best hypotheses, in half precision; and of the sums of their log-probabilities
DRAFT_MODEL = {"method": "draft_model", "model": str(PAIR / "draft"), "num_speculative_tokens": 3}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {  # options of trie_beam, and vLLM's speculative_config
    "plain steps": ({"shared_prefix_attention": "off"}, None),
    "shared blocks once": ({"shared_prefix_attention": "on"}, None),
    "drafts of a model": ({}, DRAFT_MODEL),
    "drafts by n-grams": ({}, NGRAMS),
}
COLUMNS = ("way", "same best, %", "same of all, %", "furthest best score", "steps per forward")
NOTE = (
    f"{WIDTH} beams, {MAX_TOKENS} tokens after {PROMPT_LENGTH}; compared with `generate` of transformers in float32: "
    "best hypotheses that are the same, those of all, and how far the sums of log-probabilities of best ones are apart"
)

Found = list[tuple[tuple[int, ...], float]]  # hypotheses of a prompt, the best first: tokens, and their log-probability


def prompts(count: int) -> list[list[int]]:
    """Held-out code, all of a length."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokens = tokenizer("\n\n".join(held_out_prompts(4 * count)))["input_ids"]
    return [tokens[at * PROMPT_LENGTH :][:PROMPT_LENGTH] for at in range(count)]


def by_transformers(asked: list[list[int]], device: str) -> list[Found]:
    """What transformers finds."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).to(device)
    model.generation_config.eos_token_id = None
    answer = model.generate(
        torch.tensor(asked, device=device),
        num_beams=WIDTH,
        num_return_sequences=WIDTH,
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        length_penalty=0.0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    tokens, scores = answer.sequences[:, PROMPT_LENGTH:].tolist(), answer.sequences_scores.tolist()
    found = [(tuple(own), score) for own, score in zip(tokens, scores, strict=True)]
    return [found[at : at + WIDTH] for at in range(0, len(found), WIDTH)]


def by_engine(
    asked: list[list[int]], options: dict[str, Any], drafts: dict[str, Any] | None, rehearses: bool
) -> tuple[list[Found], float]:
    """What an engine finds, and its steps per forward of the target."""
    from vllm import LLM

    from vllm_trie import beam_params

    llm = LLM(
        str(TARGET),
        dtype="float32" if rehearses else "float16",
        max_model_len=256,
        max_num_seqs=128,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=rehearses,
        compilation_config=None if rehearses else GRAPHS_ALONE,
        skip_tokenizer_init=True,
        speculative_config=drafts,
        additional_config={"trie_beam": options},
    )
    exact = {"speculation": "exact"} if drafts else {}
    params = beam_params(WIDTH, n=WIDTH, max_tokens=MAX_TOKENS, ignore_eos=True, length_penalty=0.0, **exact)
    params.detokenize = False
    try:
        outputs = generate(llm, [{"prompt_token_ids": prompt} for prompt in asked], params)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    found = [[(tuple(one.token_ids), one.cumulative_logprob) for one in output.outputs] for output in outputs]
    told = [(output.kv_transfer_params or {}).get("trie_beam", {}) for output in outputs]
    steps, forwards = (sum(of_one.get(name, 1) for of_one in told) for name in ("steps", "target_forwards"))
    return found, steps / forwards


def compared(found: list[Found], expected: list[Found]) -> tuple[float, float, float]:
    """Shares of hypotheses that are the same, of the best and of all, and the furthest score of a best one."""
    best, every, furthest = 0, 0, 0.0
    for own, theirs in zip(found, expected, strict=True):
        best += own[0][0] == theirs[0][0]
        every += len({tokens for tokens, _ in own} & {tokens for tokens, _ in theirs})
        furthest = max(furthest, abs(own[0][1] - theirs[0][1]))
    return best / len(expected), every / sum(map(len, expected)), furthest


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_searches", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, in float32")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the JSON file")
    args = parser.parse_args(arguments)
    asked, rows, failures = prompts(args.prompts), list[tuple[Any, ...]](), list[str]()
    expected = by_transformers(asked, "cpu" if args.rehearse else "cuda")
    for name in args.only:
        try:
            found, per_forward = by_engine(asked, *WAYS[name], args.rehearse)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
            print(f"FAILED {failures[-1]}", flush=True)
            continue
        best, every, furthest = compared(found, expected)
        rows.append((name, 100 * best, 100 * every, furthest, per_forward))
        print(rows[-1], flush=True)
        if best < LEAST_SAME or furthest > MOST_APART:
            failures.append(f"{name}: {best:.0%} of the best hypotheses are transformers', scores {furthest:.2g} apart")
    tell("gpu_searches", "Whole searches", COLUMNS, rows, NOTE, args.out)
    for failure in failures:
        print(f"FAILED {failure}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
