"""Wide beams on few tokens, as generative retrieval searches for identifiers: time of a step, and where it goes."""

from __future__ import annotations

import statistics

from benchmarks.common import generate, timed
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.tables.host import PARTS, ms_by_part
from vllm_trie import beam_params


def cells(setting: Setting) -> list[Cell]:
    widths = setting.widths or setting.pick((16,), (128, 512), (128, 512))
    return [(width, tokens) for width in widths for tokens in setting.pick((3,), (3, 8), (3, 4, 5, 6, 7, 8))]


def measure(bench: Bench, width: int, num_tokens: int) -> Measured:
    """One search at a time; parts are clocked in runs of their own, which clocks make slower."""
    from vllm import SamplingParams

    llm = bench.engine()
    (prompt,) = bench.prompts(1)
    as_dict = [{"prompt_token_ids": prompt}]
    options = {"max_tokens": num_tokens, "ignore_eos": True}
    params = beam_params(width, n=width, **options)
    # Without a seed: vLLM cannot rewind a seeded generator of a CPU, as it must when prompts come in parts.
    sampling = SamplingParams(n=width, temperature=1.0, **options)

    def search() -> None:
        llm.reset_prefix_cache()
        generate(llm, as_dict, params)

    def sample() -> None:
        llm.reset_prefix_cache()
        generate(llm, as_dict, sampling)

    search()
    sample()
    repeats = bench.setting.pick(2, 3, 5)
    pairs = [(timed(search), timed(sample)) for _ in range(repeats)]
    by_part = ms_by_part(llm, search, repeats)
    row = (
        width,
        num_tokens,
        1000 * statistics.median(ours for ours, _ in pairs),
        statistics.median(ours / theirs for ours, theirs in pairs),
        *by_part.values(),
    )
    return Measured([row])


TABLE = Table(
    "Wide beams on few tokens, ms",
    ("beams", "tokens", "whole search", "times sampling, n=b", *PARTS),
    cells,
    measure,
    "one search at a time, all b hypotheses returned; whole search: the call of LLM.generate; parts: of a decoding "
    "step, with clocks running; outputs: made once, shared out over the steps",
)
