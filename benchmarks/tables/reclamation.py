"""What reclamation saves and costs: the trie paper's ablation and Figure 4."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from benchmarks.common import BLOCK_SIZE, alternate, median_ratio
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.peers.tridecode import PAPERS_INTERVAL, PublishedTrieSearch
from benchmarks.significance import interval, paired, shown_p
from benchmarks.watch import clocked, reclaiming_every, watched
from vllm_trie import beam_params
from vllm_trie.engine.kv_cache import BeamKVCacheManager

NEVER = 1 << 30
NO_SHARING = "no sharing"
OURS, PUBLISHED = "beams in the engine", "trie paper's algorithm"


def ablation_cells(setting: Setting) -> list[Cell]:
    own_widths = setting.pick((3,), (9,), (3, 9))
    intervals = setting.pick((1, 15), (1, 15, 50), (1, 5, 15, 50, 250))
    return [(width, what) for width in setting.widths or own_widths for what in (NO_SHARING, NEVER, *intervals)]


def measure_ablation(bench: Bench, width: int, what: str | int) -> Measured:
    """Blocks and time with one `reclaim_interval`, or with separate sequences."""
    from vllm import SamplingParams

    setting = bench.setting
    num_tokens = setting.max_tokens or setting.pick(48, 96, 320)
    options: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True}
    llm = bench.engine(enable_prefix_caching=False)
    prompts = bench.prompts(setting.pick(1, 3, 4))
    unshared = [width * -(-(len(prompt) + num_tokens - 1) // BLOCK_SIZE) for prompt in prompts]
    params = beam_params(width, **options)
    if what == NO_SHARING:
        sampling = SamplingParams(n=width, temperature=1.0, **options)
        runs = [watched(llm, prompt, sampling) for prompt in prompts]
        timed = partial(_generate, llm, prompts[0], sampling)
        most, floors = "", [max(run.used) for run in runs]
    else:
        with reclaiming_every(llm, what):
            runs = [watched(llm, prompt, params) for prompt in prompts]
        timed = partial(_generate, llm, prompts[0], params, what)
        floors = [max(run.live) for run in runs]
        crossed = -(-min(what, num_tokens) // BLOCK_SIZE) if what > 1 else 0
        most = (width - 1) * crossed
        decoding = [held for run in runs for held in zip(run.used, run.live, strict=True) if held[1]]
        excess = max(used - live for used, live in decoding)
        assert excess <= most, f"{excess} dead blocks with {what} steps between reclamations, at most {most} expected"
    seconds = alternate({"this": timed, "every 15": partial(_generate, llm, prompts[0], params, 15)}, setting.repeats)
    peaks = [max(run.used) for run in runs]
    pairs = paired(seconds["this"], seconds["every 15"])
    row = (
        width,
        "reclaimed never" if what == NEVER else f"reclaimed every {what} steps" if what != NO_SHARING else what,
        str(interval([float(all_of - peak) for all_of, peak in zip(unshared, peaks, strict=True)])),
        statistics.fmean(peaks),
        max(peak / floor for peak, floor in zip(peaks, floors, strict=True)),
        "" if what == NO_SHARING else excess,
        most,
        statistics.median(seconds["this"]),
        median_ratio(seconds["this"], seconds["every 15"]),
        shown_p(pairs.p),
        len(prompts),
    )
    return Measured([row], {"used": [float(n) for n in runs[0].used]})


def _generate(llm: Any, prompt: list[int], params: Any, interval: int = PAPERS_INTERVAL) -> None:
    with reclaiming_every(llm, interval):
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)


ABLATION = Table(
    "Ablation: blocks saved, and time",
    (
        "beams",
        "search",
        "blocks saved (95 %)",
        "peak blocks",
        "peak over floor, worst",
        "dead blocks, most",
        "at most expected",
        "s, first prompt",
        "times as long as every 15",
        "p",
        "n",
    ),
    ablation_cells,
    measure_ablation,
    "natural prompts, one at a time, prefix caching off; saved: of what separate sequences hold at the end; floor: "
    "highest number of distinct live blocks, tails included; dead: held and not live, at any step; expected: b-1 full "
    "blocks per block boundary crossed between two reclamations; time alternates with every 15 steps; p: paired "
    "t-test over alternations; no sharing: as many sequences, sampled",
)


def cost_cells(setting: Setting) -> list[Cell]:
    widths = setting.widths or setting.pick((4,), (30,), (30,))
    intervals = setting.pick((15,), (15,), (1, 15, 50))
    return [(width, who, every) for width in widths for who in (OURS, PUBLISHED) for every in intervals]


def measure_cost(bench: Bench, width: int, who: str, interval_steps: int) -> Measured:
    """Milliseconds of every step of a long search, and of the reclamations in them."""
    setting = bench.setting
    num_tokens = setting.max_tokens or setting.pick(48, 1000, 1000)
    (prompt,) = bench.prompts(1)
    if who == OURS:
        whole, reclaim = _engine_steps(bench, prompt, width, interval_steps, num_tokens)
    else:
        found = PublishedTrieSearch(bench.reference(), interval_steps).search(prompt, width, num_tokens, None)
        whole = [1000 * seconds for seconds in found.step_seconds]
        reclaim = [0.0] * len(whole)
        reclaim[interval_steps - 1 : -1 : interval_steps] = [1000 * seconds for seconds in found.reclaim_seconds]
    each = [ms for ms in reclaim if ms]
    row = (
        width,
        who,
        len(whole),
        interval_steps,
        len(each),
        str(interval(each)),
        max(each),
        str(interval(whole)),
        100 * sum(each) / sum(whole),
    )
    return Measured([row], {"whole": whole, "reclaim": reclaim})


def _engine_steps(
    bench: Bench, prompt: list[int], width: int, interval_steps: int, num_tokens: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of each decoding step, and of the reclamation in it."""
    llm = bench.engine(enable_prefix_caching=False)
    params = beam_params(width, max_tokens=num_tokens, ignore_eos=True)
    with (
        reclaiming_every(llm, interval_steps),
        clocked(llm, {"reclaim": (BeamKVCacheManager, "_reclaim")}) as clock,
    ):
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    decoding = [step for step in clock.steps if step["whole step"]][1:]
    whole, reclaim = ([1000 * step[part] for step in decoding] for part in ("whole step", "reclaim"))
    return whole, reclaim


COST = Table(
    "Cost of reclamation against the step's",
    (
        "beams",
        "search",
        "steps",
        "reclaim_interval",
        "reclamations",
        "ms each (95 %)",
        "ms, longest",
        "ms of a step (95 %)",
        "% of all steps' time",
    ),
    cost_cells,
    measure_cost,
    "one search, without the step of the prompt; a reclamation: in the engine the walk over the trie, and blocks back "
    "to the pool; in the paper's algorithm an index_select of the whole cache",
)
