"""`make demo`: beam search inside vLLM on real code prompts, with everything measured on the spot.

Prompts are beginnings of functions from files of the Python standard library that the tiny model has
never seen.
"""

from __future__ import annotations

import argparse
import statistics
import textwrap
from functools import partial
from typing import Any

from benchmarks.common import (
    BLOCK_SIZE,
    TARGET,
    alternate,
    console,
    engine_with_draft,
    make_engine,
    median_ratio,
    one_at_a_time,
    settings,
    show,
    stop,
)
from benchmarks.prompts import CODE
from benchmarks.stdlib_pair.corpus import held_out_prompts
from benchmarks.watch import total_counts, watched
from vllm_trie import beam_params

WIDTHS = (1, 4, 8)
SHOWN = 3  # hypotheses per search
TOKENS = 48
BLOCKS_PROMPT, BLOCKS_TOKENS = 256, 96
WIDTH, DRAFTS, LAYERS = 4, 16, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=3, help="prompts to complete")
    parser.add_argument("--repeats", type=int, default=5, help="alternations per timing; medians are shown")
    args = parser.parse_args()

    console.print("Starting vLLM on a Llama of 3.1 M parameters trained on the standard library ...")
    llm = make_engine(in_process=True, enforce_eager=True)
    complete(llm, held_out_prompts(args.prompts))
    count_blocks(llm)
    take_times(llm, args.repeats)
    stop(llm)

    console.print("\nStarting vLLM on the same model with its draft model ...")
    speculate(engine_with_draft(LAYERS), held_out_prompts(args.prompts))


def complete(llm: Any, prompts: list[str]) -> None:
    """Complete every prompt with every width, all in one batch."""
    batch = [(prompt, width) for prompt in prompts for width in WIDTHS]
    params = [beam_params(width, n=min(width, SHOWN), max_tokens=TOKENS) for _, width in batch]
    outputs = llm.generate([prompt for prompt, _ in batch], params)
    for prompt in prompts:
        rows = []
        for (searched, width), output in zip(batch, outputs, strict=True):
            if searched is prompt:
                for rank, hypothesis in enumerate(output.outputs, start=1):
                    score = hypothesis.cumulative_logprob / len(hypothesis.token_ids)
                    rows.append((width, rank, f"{score:.4f}", hypothesis.finish_reason, _shown(hypothesis.text)))
        console.print(f"\n[bold]Prompt[/bold] ({len(prompt)} characters, held out), its end:", highlight=False)
        console.print("".join(prompt.splitlines(keepends=True)[-4:]), style="cyan", markup=False, highlight=False)
        show(
            "Hypotheses, best first",
            ("beams", "rank", "score", "ended by", "completion"),
            rows,
            "score: log-probability per token (length_penalty=1); more beams compare more hypotheses by their sums, "
            "which does not always raise the best score",
        )


def speculate(llm: Any, prompts: list[str]) -> None:
    """Search with and without a draft, and draw beams: the same answers in fewer forwards of the model, counted."""
    modes = {
        "beam search": {"speculation": "exact"},
        "beam sampling": {"do_sample": True, "seed": 1, "temperature": 0.7},
        "beam sampling, dynamic width": {"do_sample": True, "seed": 1, "temperature": 0.7, "threshold": 0.7},
    }
    plain = [
        output.outputs[0].token_ids
        for output in llm.generate(prompts, beam_params(WIDTH, max_tokens=TOKENS, speculation="off"))
    ]
    rows = []
    for mode, options in modes.items():
        params = beam_params(WIDTH, max_tokens=TOKENS, draft_width=DRAFTS, **options)
        outputs = one_at_a_time(llm, prompts, params)
        counts = total_counts(outputs)
        same = sum(output.outputs[0].token_ids == answer for output, answer in zip(outputs, plain, strict=True))
        rows.append(
            (
                mode,
                f"{counts.steps_per_forward:.2f}",
                counts.drafted,
                counts.accepted,
                f"{counts.mean_width:.2f}",
                f"{same} of {len(prompts)}" if mode == "beam search" else "",
            )
        )
    show(
        f"Speculation: {WIDTH} beams, {DRAFTS} drafts x {LAYERS} layers",
        ("mode", "steps per forward", "drafted", "accepted", "mean width", "answers of plain beam search"),
        rows,
        "steps per forward: tokens by which all beams grow per forward of the model",
    )


def _shown(text: str, lines: int = 6) -> str:
    kept = textwrap.dedent(text.strip("\n")).split("\n")
    return "\n".join(kept[:lines] + (["..."] if len(kept) > lines else []))


def count_blocks(llm: Any) -> None:
    """Peak KV blocks of one search, from vLLM's own pool, against rows that share nothing."""
    (prompt,) = CODE.tokens(str(TARGET), 1, BLOCKS_PROMPT)
    rows = []
    for width in WIDTHS:
        params = beam_params(width, max_tokens=BLOCKS_TOKENS, ignore_eos=True)
        peak = max(watched(llm, prompt, params, width).used)
        unshared = width * -(-(BLOCKS_PROMPT + BLOCKS_TOKENS - 1) // BLOCK_SIZE)
        rows.append((width, peak, unshared, f"{peak / unshared:.2f}"))
    show(
        f"KV blocks at the peak, prompt of {BLOCKS_PROMPT} tokens, {BLOCKS_TOKENS} new ones",
        ("beams", "in the trie", "unshared", "ratio"),
        rows,
        "in the trie: read from vLLM's BlockPool in every step; unshared: b rows of their own",
    )


def take_times(llm: Any, repeats: int) -> None:
    """Time against vLLM's own beam loop and against plain sampling of as many sequences and tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import BeamSearchParams

    from vllm_trie.entrypoints.llm import beam_search

    prompts = held_out_prompts(4)
    rows = []
    for width in WIDTHS[1:]:
        options = {"max_tokens": TOKENS, "ignore_eos": True}
        client = BeamSearchParams(beam_width=width, **options)
        seconds = alternate(
            {
                "client": partial(beam_search.original, llm, [{"prompt": prompt} for prompt in prompts], client),
                "sampling": partial(llm.generate, prompts, SamplingParams(n=width, **options), use_tqdm=False),
                "engine": partial(llm.generate, prompts, beam_params(width, n=width, **options), use_tqdm=False),
            },
            repeats,
        )
        engine = seconds["engine"]
        rows.append(
            (
                width,
                *(f"{statistics.median(seconds[name]):.3f}" for name in ("engine", "sampling", "client")),
                f"{median_ratio(engine, seconds['sampling']):.2f}",
                f"{median_ratio(seconds['client'], engine):.1f}",
            )
        )
    show(
        f"Seconds for {len(prompts)} prompts x {TOKENS} tokens",
        ("beams", "in the engine", "plain sampling", "vLLM's own loop", "engine / sampling", "times faster"),
        rows,
        f"{settings(enforce_eager=True)}; medians of {repeats} alternations",
    )


if __name__ == "__main__":
    main()
