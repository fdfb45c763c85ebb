"""The grid of dynamic-width beam sampling: what layers, widths and thresholds bring in speed, and cost in quality.

The DSBD paper's grid. A setting is on the front if no other is as fast and as good, and faster or better.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks import models
from benchmarks.beam_sampling import PLAIN, TEMPERATURE, sampled_params
from benchmarks.common import median_ratio
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.tables.dsbd import WIDEST, depth, expected_steps, in_turn, warm_up
from benchmarks.watch import total_counts

DYNAMIC = "dynamic width"
COLUMNS = (
    "search",
    "layers",
    "draft width",
    "threshold",
    "least width",
    "mean width",
    "layers accepted, a",
    "steps per forward by Theorem 3.2",
    "steps per forward",
    f"times as fast as beam sampling, {WIDEST}",
    "mean log p",
    "front",
)
SPEED, QUALITY, FRONT = (COLUMNS.index(name) for name in (COLUMNS[-3], "mean log p", "front"))


def cells(setting: Setting) -> list[Cell]:
    return [(depth(setting),)]


def grid(setting: Setting) -> list[tuple[int, list[tuple[int, float, int]]]]:
    """By layers: draft widths with thresholds and least widths, at most the draft width."""
    draft_widths = setting.widths or setting.pick((3,), (2, 4, 6), (2, 3, 4, 5, 6))
    thresholds, least_widths = setting.pick((0.7,), (0.7,), (0.7, 0.9)), setting.pick((1,), (1, 2), (1, 2, 3))
    rest = [one for one in product(draft_widths, thresholds, least_widths) if one[2] <= one[0]]
    return [(layers, rest) for layers in setting.pick((2,), (3,), (2, 3, 4))]


def measure(bench: Bench, times: int) -> Measured:
    """The whole grid, each setting in turn with beam sampling of the greatest width."""
    setting = bench.setting
    num_tokens = setting.max_tokens or setting.pick(6, 16, 16)
    prompts = bench.prompts(setting.pick(2, 3, 4))
    reference = sampled_params(WIDEST, num_tokens, PLAIN)
    rows: list[list[Any]] = []

    def add(llm: Any, begin: Sequence[Any], width: int, options: dict[str, Any], num_layers: int | None) -> None:
        base, own = in_turn(llm, prompts, [reference, sampled_params(width, num_tokens, options)], 1)
        measured: tuple[Any, ...] = (width, "", "", 1.0)
        if num_layers is not None:
            counts = total_counts(own.outputs)
            expected = expected_steps(own.layers.acceptance, num_layers)
            measured = counts.mean_width, own.layers.acceptance, expected, counts.steps_per_forward
        quality = statistics.fmean(own.log_probability)
        rows.append([*begin, *measured, median_ratio(base.seconds, own.seconds), quality, ""])

    for number, (layers, settings) in enumerate(grid(setting)):
        llm = bench.engine_with_draft(layers, variant=models.deeper(times))
        with_drafts = sampled_params(WIDEST, num_tokens, {"do_sample": True, "draft_width": WIDEST})
        warm_up(llm, prompts[0], [reference, with_drafts])
        for width in () if number else range(1, WIDEST + 1):
            add(llm, (f"beam sampling, {width}", "", "", "", ""), width, PLAIN, None)
        for draft_width, threshold, least in settings:
            options = {"do_sample": True, "draft_width": draft_width, "threshold": threshold, "min_width": least}
            add(llm, (DYNAMIC, layers, draft_width, threshold, least), draft_width, options, layers)
    for at in front([(row[SPEED], row[QUALITY]) for row in rows]):
        rows[at][FRONT] = "yes"
    return Measured([tuple(row) for row in rows])


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which of these no other one dominates: is at least as great in both coordinates, and greater in one."""
    return [
        at for at, (x, y) in enumerate(points) if not any(a >= x and b >= y and (a > x or b > y) for a, b in points)
    ]


TABLE = Table(
    "Dynamic width: speed against quality",
    COLUMNS,
    cells,
    measure,
    "layers are up to draft width beams wide, as in the DSBD paper; beam sampling: without drafts; "
    f"temperature={TEMPERATURE}, EOS ignored; one search at a time, in turn with beam sampling of {WIDEST} at equal "
    "seeds, medians of ratios; log p: of the chosen answer, per token; front: none is as fast and as good, and faster "
    "or better; the toy's target is made deeper, as in the table of modes",
    needs_draft=True,
)
