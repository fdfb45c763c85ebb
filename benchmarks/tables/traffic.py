"""What ordinary requests feel of beams in their batch."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise, product
from typing import Any

from benchmarks.common import generate
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.significance import interval, paired, shown_p
from vllm_trie import beam_params

ALONE, SAMPLES, BEAMS = "nothing", "sampling, n=b", "a beam search"
SHORT, LONGEST = 64, 4096  # tokens: of an ordinary prompt, and of any request
LONG = (32, 512), (32, 1024), (128, 1024)  # beams, and tokens of a prompt that they share


def cells(setting: Setting) -> list[Cell]:
    shapes = setting.pick([(4, SHORT)], [(8, SHORT), (32, 1024)], [(4, SHORT), (8, SHORT), (32, SHORT), *LONG])
    return [*product(setting.widths, (SHORT, 1024))] if setting.widths else shapes


def measure(bench: Bench, width: int, num_prompt: int) -> Measured:
    """Ordinary requests, one after the other: alone, in batches with samples, and in batches with beams, in turn."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    setting = bench.setting
    num_tokens = setting.max_tokens or setting.pick(8, 32, 32)
    limits = {"max_num_batched_tokens": 2 * LONGEST, "max_model_len": LONGEST, "max_num_seqs": 512}
    llm = bench.engine(hf_overrides={"max_position_embeddings": LONGEST}, **limits)
    ordinary, background = bench.prompts(2, 1000)
    ordinary, background = ordinary[:SHORT], (background * 2)[:num_prompt]
    long: dict[str, Any] = {"max_tokens": 480 + num_tokens, "ignore_eos": True}
    long["output_kind"] = RequestOutputKind.FINAL_ONLY
    kinds: dict[str, Any] = {
        ALONE: None,
        SAMPLES: SamplingParams(n=width, temperature=1.0, **long),
        BEAMS: beam_params(width, n=width, **long),
    }
    first: dict[str, list[float]] = {name: [] for name in kinds}
    between: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(1 + setting.pick(2, 10, 20)):
        for name, params in kinds.items():
            llm.reset_prefix_cache()
            generate(llm, [{"prompt_token_ids": background}], SamplingParams(max_tokens=1))  # it is cached
            to_first, others = _latencies(llm, ordinary, num_tokens, background, params)
            if number:  # the first of each is its warm-up
                first[name].append(to_first)
                between[name].append(statistics.fmean(others))
    rows = []
    for name in kinds:
        pairs = paired(between[name], between[SAMPLES])
        rows.append(
            (
                width,
                num_prompt,
                name,
                str(interval(first[name])),
                str(interval(between[name])),
                "" if name == SAMPLES else str(pairs.ratio),
                pairs.n,
                "" if name == SAMPLES else shown_p(pairs.p),
            )
        )
    return Measured(rows)


def _latencies(
    llm: Any, prompt: list[int], num_tokens: int, background: list[int], background_params: Any
) -> tuple[float, list[float]]:
    """Milliseconds to the first token of an ordinary request, and between its others."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    if background_params is not None:
        engine.add_request("background", {"prompt_token_ids": background}, background_params)
        for _ in range(4):  # its prompt, and some steps
            engine.step()
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    times = [time.perf_counter()]
    engine.add_request("ordinary", {"prompt_token_ids": prompt}, params)
    while len(times) <= num_tokens:
        for output in engine.step():
            if output.request_id == "ordinary" and len(output.outputs[0].token_ids) == len(times):
                times.append(time.perf_counter())
    if background_params is not None:
        engine.abort_request(["background"])
    while engine.has_unfinished_requests():
        engine.step()
    millis = [1000 * (b - a) for a, b in pairwise(times)]
    return millis[0], millis[1:]


TABLE = Table(
    "Ordinary traffic in a batch with beams",
    (
        "beams",
        "prompt tokens",
        "in the same batch",
        "ms to its first token (95 %)",
        "ms per further token (95 %)",
        "times that with sampling (95 %)",
        "n",
        "p",
    ),
    cells,
    measure,
    f"one ordinary request at a time, greedy, of {SHORT} tokens; a search and as many samples, after a cached prompt, "
    "take turns in the same batch; p: paired t-test of log milliseconds per further token",
)
