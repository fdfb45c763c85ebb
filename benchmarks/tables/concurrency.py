"""Many searches at once: tokens per second by groups and width, and what fails."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.common import timed
from benchmarks.harness import MAX_NUM_SEQS, Bench, Cell, Measured, Setting, Table
from vllm_trie import beam_params
from vllm_trie.entrypoints.beam_search import beam_search

CLIENT_LOOP = "vLLM's LLM.beam_search"
MOST_CLIENT_ROWS = 128  # beyond them its loop takes minutes


def cells(setting: Setting) -> list[Cell]:
    widths = setting.widths or setting.pick((4,), (4, 16), (4, 16, 64))
    return [(groups, width) for groups in setting.pick((1, 2), (1, 8), (1, 8, 32)) for width in widths]


def measure(bench: Bench, groups: int, width: int) -> Measured:
    """Every peer on the same batch; what raises is a failed cell and the rest goes on."""
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import BeamSearchParams

    setting = bench.setting
    num_tokens = setting.max_tokens or setting.pick(4, 16, 16)
    llm, reference = bench.engine(), bench.reference()
    prompts = bench.prompts(groups, 64)
    as_dicts: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    options: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True}

    def transformers() -> None:
        ids = torch.tensor(prompts, device=reference.device)
        with torch.inference_mode():
            reference.generate(
                ids, attention_mask=torch.ones_like(ids), num_beams=width, max_new_tokens=num_tokens, do_sample=False
            )

    def generate(params: Any) -> Callable[[], Any]:
        return lambda: llm.generate(as_dicts, params, use_tqdm=False)

    runs: dict[str, Callable[[], Any]] = {
        "beams in the engine": generate(beam_params(width, **options)),
        "vLLM sampling, n=b": generate(SamplingParams(n=width, temperature=1.0, **options)),
        "transformers generate": transformers,
    }
    if groups * width <= MOST_CLIENT_ROWS:
        params = BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True)
        runs[CLIENT_LOOP] = lambda: beam_search.original(llm, as_dicts, params)
    row: list[Any] = [groups, width]
    for name in ("beams in the engine", "vLLM sampling, n=b", "transformers generate", CLIENT_LOOP):
        if name not in runs:
            row.append("not run")
            continue
        try:
            seconds = [timed(runs[name]) for _ in range(1 + setting.pick(1, 1, setting.repeats))][1:]
        except Exception as error:
            row.append(f"failed: {type(error).__name__}: {str(error).splitlines()[0][:60] if str(error) else ''}")
        else:
            row.append(groups * num_tokens / statistics.median(seconds))
    return Measured([tuple(row)])


TABLE = Table(
    "Concurrency: answers' tokens per second",
    ("groups", "beams", "beams in the engine", "vLLM sampling, n=b", "transformers generate", CLIENT_LOOP),
    cells,
    measure,
    f"prompts of 64 tokens, all at once, {MAX_NUM_SEQS} rows at a time in the engine; answers' tokens: groups x tokens "
    f"of one hypothesis; {CLIENT_LOOP} is not run beyond {MOST_CLIENT_ROWS} rows; EOS ignored",
)
