"""Beam sampling with drafts and without, at equal seeds: the DSBD paper's comparison, mode by mode."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks import models
from benchmarks.beam_sampling import DRAFTS, MODES, TEMPERATURE, Params, sampled_params
from benchmarks.common import generate
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.significance import interval, paired
from benchmarks.tables.energy import Meter, joules_per_call, meters
from benchmarks.watch import Layers, manager_of, total_counts, verified_layers

LAYERS = 3  # as many as the paper drafts
WIDEST = 4


def expected_steps(acceptance: float, num_layers: int) -> float:
    """Steps per forward if each layer is accepted with this probability, whatever became of the others.

    Source: DSBD paper, Theorem 3.2: 1 + a + ... + a^g.
    """
    return sum(acceptance**number for number in range(num_layers + 1))


@dataclass
class Sampled:
    """What one way to search came to; lists are by sample."""

    seconds: list[float] = field(default_factory=list)  # medians over rounds
    outputs: list[Any] = field(default_factory=list)
    peak_blocks: list[int] = field(default_factory=list)
    layers: Layers = field(default_factory=Layers)

    @property
    def log_probability(self) -> list[float]:
        """Of the chosen answers, per token, at temperature 1."""
        best = [output.outputs[0] for output in self.outputs]
        return [answer.cumulative_logprob / len(answer.token_ids) for answer in best]


def in_turn(llm: Any, prompts: Sequence[list[int]], ways: Sequence[Params], rounds: int) -> list[Sampled]:
    """Search each prompt in each way, one search at a time: prompt by prompt the ways take turns, `rounds` times.

    Args:
        prompts: A sample each, whose number is its seed in every way.
        ways: Outputs and counts are those of their first round.
    """
    manager, found = manager_of(llm), [Sampled() for _ in ways]

    def search(seed: int, params: Params) -> list[Any]:
        return generate(llm, [{"prompt_token_ids": prompts[seed]}], params(seed))

    for seed in range(len(prompts)):
        seconds: list[list[float]] = [[] for _ in ways]
        for number in range(rounds):
            for params, times, sampled in zip(ways, seconds, found, strict=True):
                manager.peak_group_blocks = 0
                with verified_layers() as layers:
                    start = time.perf_counter()
                    outputs = search(seed, params)
                    times.append(time.perf_counter() - start)
                if number == 0:
                    sampled.outputs += outputs
                    sampled.peak_blocks.append(manager.peak_group_blocks)
                    sampled.layers.add(layers)
        for sampled, times in zip(found, seconds, strict=True):
            sampled.seconds.append(statistics.median(times))
    return found


def warm_up(llm: Any, prompt: list[int], ways: Sequence[Params]) -> None:
    """The first searches of an engine take longer."""
    for params in ways:
        generate(llm, [{"prompt_token_ids": prompt}], params(0))


def depth(setting: Setting) -> int:
    """How many times as deep as the model the target is: the toy is too small to gain."""
    return setting.pick(1, 4, 16) if setting.is_toy else 1


def cells(setting: Setting) -> list[Cell]:
    return [(depth(setting), name) for name in setting.pick(list(MODES)[2:3], list(MODES), list(MODES))]


def measure(bench: Bench, times: int, name: str) -> Measured:
    """One mode in turn with what it is held against."""
    setting, mode = bench.setting, MODES[name]
    num_tokens = setting.max_tokens or setting.pick(6, 16, 32)
    llm = bench.engine_with_draft(LAYERS, variant=models.deeper(times))
    prompts = bench.prompts(setting.pick(2, 3, 5))
    options = [(mode.plain_width, mode.plain_options), (mode.width, mode.options)]
    ways = [sampled_params(width, num_tokens, own) for width, own in options]
    warm_up(llm, prompts[0], ways)
    plain, drafted = in_turn(llm, prompts, ways, setting.pick(1, 3, setting.repeats))
    counts = total_counts(drafted.outputs)
    speed = paired(plain.seconds, drafted.seconds)
    row = (
        f"{times}x",
        name,
        f"beam sampling, {mode.plain_width}",
        counts.mean_width,
        drafted.layers.acceptance,
        expected_steps(drafted.layers.acceptance, LAYERS),
        counts.steps_per_forward,
        1000 * statistics.fmean(plain.seconds) / num_tokens,
        str(speed.ratio),
        str(interval(plain.log_probability)),
        str(interval(drafted.log_probability)),
        sum(plain.peak_blocks),
        sum(drafted.peak_blocks),
        speed.n,
    )
    return Measured([row])


TABLE = Table(
    "Beam sampling with drafts and without, at equal seeds",
    (
        "depth of the target",
        "with drafts",
        "without",
        "mean width",
        "layers accepted, a",
        "steps per forward by Theorem 3.2",
        "steps per forward",
        "ms per token, without",
        "times faster (95 %)",
        "mean log p, without (95 %)",
        "mean log p, with (95 %)",
        "peak blocks, without",
        "peak blocks, with",
        "n",
    ),
    cells,
    measure,
    f"layers={LAYERS}, {DRAFTS} drafts in each (one sequence: 1), temperature={TEMPERATURE}, EOS ignored; one search "
    "at a time, both in turn on each of n prompts, each with its seed, medians; with drafts other beams are sampled, "
    'of the same distribution, but where accept="top_k" is inexact; Theorem 3.2: (1 - a^(g+1)) / (1 - a), with g '
    "layers of which a share a is accepted; there are fewer steps where max_tokens ends a search; dynamic width: "
    "threshold=0.7; log p: of the chosen answer, per token; blocks: summed over prompts; times faster: geometric mean; "
    "deeper targets have further layers that change nothing",
    needs_draft=True,
)


def energy_cells(setting: Setting) -> list[Cell]:
    return [(depth(setting), name) for name in setting.pick(list(MODES)[2:3], list(MODES)[2:3], list(MODES))]


def measure_energy(bench: Bench, times: int, name: str) -> Measured:
    """Joules per token with drafts and without, each for at least some seconds."""
    found: list[Meter] = meters()
    if not found:
        return Measured([(name, "all", "not measured: no RAPL counter and no GPU that tells can be read here", "", "")])
    setting, mode = bench.setting, MODES[name]
    num_tokens = setting.max_tokens or 32
    llm = bench.engine_with_draft(LAYERS, variant=models.deeper(times))
    (prompt,) = bench.prompts(1)
    ways = [(mode.plain_width, mode.plain_options), (mode.width, mode.options)]
    rows = list[Cell]()
    for meter in found:
        taken = []
        for width, options in ways:
            params = sampled_params(width, num_tokens, options)(0)
            run = partial(generate, llm, [{"prompt_token_ids": prompt}], params)
            taken.append(joules_per_call(meter, run, setting.pick(1, 5, 20)) / num_tokens)
        rows.append((name, meter.name, *taken, taken[0] / taken[1]))
    return Measured(rows)


ENERGY = Table(
    "Energy of beam sampling with drafts and without",
    ("with drafts", "meter", "J per token, without", "J per token, with", "times less"),
    energy_cells,
    measure_energy,
    f"layers={LAYERS}, {DRAFTS} drafts in each, temperature={TEMPERATURE}, EOS ignored; of the whole package or "
    "device, whatever else runs on it",
    needs_draft=True,
)
