"""Whole searches of a small trained model on a GPU, in float16, against transformers'.

    python -m benchmarks.gpu_searches

Each way in which an engine may run on a GPU: by CUDA graphs, with shared blocks read once, with drafts of a model along
trees, and with drafts by n-grams. Most hypotheses must be those of transformers in float16: not all, since two
implementations round otherwise, and what one of them keeps by a hair the other drops. But every hypothesis must have
the log-probability that transformers gives it in float32, up to rounding: blocks that beams mixed up would change it.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import PAIR, TARGET, generate
from benchmarks.gpu_engines.offline import NGRAMS
from benchmarks.gpu_engines.options import GRAPHS_ALONE
from benchmarks.gpu_tables import tell
from benchmarks.stdlib_pair.corpus import held_out_prompts

WIDTH, PROMPT_LENGTH, MAX_TOKENS = 5, 96, 32
LEAST_SAME, MOST_APART = 0.8, 0.25  # of best hypotheses, and of a sum of log-probabilities, in half precision
DRAFT_MODEL = {"method": "draft_model", "model": str(PAIR / "draft"), "num_speculative_tokens": 3}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {  # options of trie_beam, and vLLM's speculative_config
    "plain steps": ({"shared_prefix_attention": "off"}, None),
    "shared blocks once": ({"shared_prefix_attention": "on"}, None),
    "drafts of a model": ({}, DRAFT_MODEL),
    "drafts by n-grams": ({}, NGRAMS),
}
COLUMNS = ("way", "same best, %", "same of all, %", "furthest sum", "steps per forward")
NOTE = (
    f"{WIDTH} beams, {MAX_TOKENS} tokens after {PROMPT_LENGTH}; compared with transformers: best hypotheses that its "
    "`generate` finds, too, in float16, and those of all; and how far any sum of log-probabilities is from what it "
    "gives the same tokens in float32"
)

Found = list[tuple[tuple[int, ...], float]]  # hypotheses of a prompt, the best first: tokens, and their log-probability


def prompts(count: int) -> list[list[int]]:
    """Held-out code, all of a length."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokens = tokenizer("\n\n".join(held_out_prompts(4 * count)))["input_ids"]
    return [tokens[at * PROMPT_LENGTH :][:PROMPT_LENGTH] for at in range(count)]


def model_of_transformers(device: str, dtype: str) -> Any:
    """The target."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=dtype).to(device)
    model.generation_config.eos_token_id = None
    return model


def by_transformers(asked: list[list[int]], device: str, dtype: str) -> list[Found]:
    """What transformers finds."""
    import torch

    answer = model_of_transformers(device, dtype).generate(
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


def sums_of(asked: list[list[int]], found: list[Found], device: str) -> list[list[float]]:
    """The log-probability in float32 that transformers gives each hypothesis."""
    import torch

    model, sums = model_of_transformers(device, "float32"), list[list[float]]()
    for prompt, own in zip(asked, found, strict=True):
        tokens = torch.tensor([[*prompt, *new] for new, _ in own], device=device)
        with torch.inference_mode():
            logprobs = model(tokens).logits[:, PROMPT_LENGTH - 1 : -1].log_softmax(-1)
        sums.append(logprobs.gather(-1, tokens[:, PROMPT_LENGTH:, None]).sum(dim=(1, 2)).tolist())
    return sums


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
        gpu_memory_utilization=0.1,
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
    answers = [(output.kv_transfer_params or {}).get("trie_beam", {}) for output in outputs]
    steps, forwards = (sum(of_one.get(name, 1) for of_one in answers) for name in ("steps", "target_forwards"))
    return found, steps / forwards


def compared(found: list[Found], expected: list[Found], sums: list[list[float]]) -> tuple[float, float, float]:
    """Shares of hypotheses that are the same, of the best and of all, and the furthest that one is from its sum."""
    best, every, furthest = 0, 0, 0.0
    for own, theirs, of_own in zip(found, expected, sums, strict=True):
        best += own[0][0] == theirs[0][0]
        every += len({tokens for tokens, _ in own} & {tokens for tokens, _ in theirs})
        furthest = max(furthest, *(abs(score - exact) for (_, score), exact in zip(own, of_own, strict=True)))
    return best / len(expected), every / sum(map(len, expected)), furthest


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_searches", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, in float32")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the JSON file")
    args = parser.parse_args(arguments)
    asked, rows, failures = prompts(args.prompts), list[tuple[Any, ...]](), list[str]()
    device, dtype = ("cpu", "float32") if args.rehearse else ("cuda", "float16")
    expected = by_transformers(asked, device, dtype)
    for name in args.only:
        try:
            found, per_forward = by_engine(asked, *WAYS[name], args.rehearse)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
            print(f"FAILED {failures[-1]}", flush=True)
            continue
        best, every, furthest = compared(found, expected, sums_of(asked, found, device))
        rows.append((name, 100 * best, 100 * every, furthest, per_forward))
        print(rows[-1], flush=True)
        if best < LEAST_SAME or furthest > MOST_APART:
            failures.append(f"{name}: {best:.0%} of the best hypotheses are transformers', sums {furthest:.2g} apart")
    tell("gpu_searches", "Whole searches", COLUMNS, rows, NOTE, args.out)
    for failure in failures:
        print(f"FAILED {failure}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
