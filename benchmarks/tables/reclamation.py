"""What reclamation saves and costs: the trie paper's ablation and Figure 4."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from benchmarks.common import BLOCK_SIZE, generate, timed
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.peers.tridecode import PAPERS_INTERVAL, PublishedTrieSearch
from benchmarks.significance import interval, paired, shown_p
from benchmarks.watch import Steps, clocked, has_window, reclaiming_every, watched
from vllm_trie import beam_params
from vllm_trie.engine.kv_cache import BeamKVCacheManager

NEVER = 1 << 30
NO_SHARING = "no sharing"
OURS, PUBLISHED = "beams in the engine", "trie paper's algorithm"


def ablation_cells(setting: Setting) -> list[Cell]:
    intervals = setting.pick((1, 15), (1, 15, 50), (1, 5, 15, 50, 250))
    widths = setting.widths or setting.pick((3,), (9,), (3, 9))  # the paper's has 3
    return [(width, what) for width in widths for what in (NO_SHARING, NEVER, *intervals)]


def measure_ablation(bench: Bench, width: int, what: str | int) -> Measured:
    """Blocks and time with one `reclaim_interval`, or with separate sequences."""
    from vllm import SamplingParams

    setting = bench.setting
    num_tokens = setting.max_tokens or setting.pick(48, 96, 320)
    options: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True}
    llm = bench.engine(enable_prefix_caching=False)
    prompts = bench.prompts(setting.pick(2, 3, 6))
    unshared = [width * -(-(len(prompt) + num_tokens - 1) // BLOCK_SIZE) for prompt in prompts]
    params = beam_params(width, **options)
    if what == NO_SHARING:
        sampling = SamplingParams(n=width, temperature=1.0, **options)
        runs = [watched(llm, prompt, sampling, width) for prompt in prompts]
        search = partial(_generate, llm, sampling, PAPERS_INTERVAL)
        dead, mortal, floors = "", "", [max(run.used) for run in runs]
    else:
        with reclaiming_every(llm, what):
            runs = [watched(llm, prompt, params, width) for prompt in prompts]
        search = partial(_generate, llm, params, what)
        floors = [max(run.live) for run in runs]
        dead, mortal = max(most_dead(run, width) for run in runs)
        if has_window(llm):
            mortal = ""  # what leaves it dies too
        else:
            assert dead <= mortal, f"{dead} dead blocks with {what} steps between reclamations, {mortal} can have died"
    every_15 = partial(_generate, llm, params, PAPERS_INTERVAL)
    seconds = [(timed(partial(search, prompt)), timed(partial(every_15, prompt))) for prompt in prompts]
    peaks = [max(run.used) for run in runs]
    pairs = paired(*zip(*seconds, strict=True))
    row = (
        width,
        "reclaimed never" if what == NEVER else f"reclaimed every {what} steps" if what != NO_SHARING else what,
        str(interval([float(all_of - peak) for all_of, peak in zip(unshared, peaks, strict=True)])),
        statistics.fmean(peaks),
        max(peak / floor for peak, floor in zip(peaks, floors, strict=True)),
        dead,
        mortal,
        statistics.fmean(ours for ours, _ in seconds),
        str(pairs.ratio),
        shown_p(pairs.p),
        pairs.n,
    )
    return Measured([row], {"used": [float(n) for n in runs[0].used]})


def most_dead(run: Steps, width: int) -> tuple[int, int]:
    """The most blocks that were held and not live, and how many can have died by then.

    Of the blocks that beams led to when last all were live, one at each depth lives on, and all tails; of those that
    became full since, one of each block boundary crossed.
    """
    most, last = (0, 0), (0, 0)
    for used, live, path in zip(run.used, run.live, run.path, strict=True):
        if not live:  # the prompt
            continue
        if used == live:
            last = live, path
        last_live, last_path = last
        mortal = last_live - width - (last_path - 1) + (width - 1) * (path - last_path)
        most = max(most, (used - live, mortal), key=lambda counts: counts[0])
    return most


def _generate(llm: Any, params: Any, interval: int, prompt: list[int]) -> None:
    with reclaiming_every(llm, interval):
        generate(llm, [{"prompt_token_ids": prompt}], params)


ABLATION = Table(
    "Ablation: blocks saved, and time",
    (
        "beams",
        "search",
        "blocks saved (95 %)",
        "peak blocks",
        "peak over floor, worst",
        "dead blocks, most",
        "can have died by then",
        "s",
        "times as long as every 15 (95 %)",
        "p",
        "n",
    ),
    ablation_cells,
    measure_ablation,
    "natural prompts, one at a time, prefix caching off, blocks counted in every step before its forward; saved: of "
    "what separate sequences hold at the end; floor: highest number of distinct live blocks, one tail for each row "
    "among them; dead: held and not live; can have died: since all were live, b-1 full blocks for every block boundary "
    "crossed, and all but one at each depth of those that beams led to then; s: mean; each prompt is searched every 15 "
    "steps in turn; times: geometric mean; p: paired t-test of log seconds over prompts; no sharing: as many "
    "sequences, sampled",
)


def cost_cells(setting: Setting) -> list[Cell]:
    widths = setting.widths or setting.pick((4,), (30,), (30,))
    intervals = setting.pick((15,), (15,), (1, 15, 50))
    return [(width, who, every) for width in widths for who in (OURS, PUBLISHED) for every in intervals]


def measure_cost(bench: Bench, width: int, who: str, interval_steps: int) -> Measured:
    """Milliseconds of every step of a long search, and of the reclamations in them."""
    setting = bench.setting
    num_tokens = max(setting.max_tokens or setting.pick(48, 1000, 1000), interval_steps + 2)  # at least one falls due
    (prompt,) = bench.prompts(1)
    if who == OURS:
        whole, reclaim, forks = _engine_steps(bench, prompt, width, interval_steps, num_tokens)
    else:
        found = PublishedTrieSearch(bench.reference(), interval_steps).search(prompt, width, num_tokens, None)
        whole = [1000 * seconds for seconds in found.step_seconds]
        reclaim = [0.0] * len(whole)
        reclaim[interval_steps - 1 : -1 : interval_steps] = [1000 * seconds for seconds in found.reclaim_seconds]
        forks = reclaim
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
        100 * sum(forks) / sum(whole),
    )
    return Measured([row], {"whole": whole, "reclaim": reclaim})


def _engine_steps(
    bench: Bench, prompt: list[int], width: int, interval_steps: int, num_tokens: int
) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of each decoding step, of the reclamation in it, and of all that its forks do to blocks."""
    llm = bench.engine(enable_prefix_caching=False)
    params = beam_params(width, max_tokens=num_tokens, ignore_eos=True)
    with (
        reclaiming_every(llm, interval_steps),
        clocked(llm, {part: (BeamKVCacheManager, part) for part in ("_reclaim", "replay_forks")}) as clock,
    ):
        generate(llm, [{"prompt_token_ids": prompt}], params)
    decoding = [step for step in clock.steps if step["whole step"]][1:]
    parts = ("whole step", "_reclaim", "replay_forks")
    whole, reclaim, forks = ([1000 * step[part] for step in decoding] for part in parts)
    return whole, reclaim, forks


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
        "% with finding what is dead",
    ),
    cost_cells,
    measure_cost,
    "one search, without the step of the prompt; a reclamation: in the engine dead blocks go back to the pool; finding "
    "them is a matter of reference counts, in every fork: with that is all that forks do to the trie of blocks; in the "
    "paper's algorithm the search for live entries, and an index_select of the whole cache",
)
