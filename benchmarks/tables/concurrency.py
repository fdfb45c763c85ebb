"""Many searches at once: tokens per second by groups and width, and what fails."""

from __future__ import annotations

from functools import partial

from benchmarks import models
from benchmarks.common import timed
from benchmarks.harness import MAX_NUM_SEQS, Bench, Cell, Measured, Setting, Table
from benchmarks.significance import interval, paired, shown_p
from benchmarks.tables.throughput import CLIENT_LOOP, CTRANSLATE2, OURS, SAMPLING, TRANSFORMERS, searches

PEERS = (OURS, SAMPLING, TRANSFORMERS, CTRANSLATE2, CLIENT_LOOP)
MOST_CLIENT_ROWS = 128  # beyond them its loop takes minutes


def cells(setting: Setting) -> list[Cell]:
    widths = setting.widths or setting.pick((4,), (4, 16), (4, 16, 64))
    return [(groups, width) for groups in setting.pick((1, 2), (1, 8), (1, 8, 32)) for width in widths]


def measure(bench: Bench, groups: int, width: int) -> Measured:
    """The peers in turn on the same batch; what raises is a failed cell, and the rest continues."""
    setting = bench.setting
    num_tokens = setting.max_tokens or setting.pick(4, 16, 16)
    prompts = bench.prompts(groups, 64)
    llm, runs = bench.engine(), searches(bench, models.AS_IT_IS, width, num_tokens)
    peers = [name for name in PEERS if name in runs]
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    without = {CLIENT_LOOP: "not run"} if groups * width > MOST_CLIENT_ROWS else {}
    for _ in range(1 + setting.repeats):
        for name in peers:
            if name in without:
                continue
            llm.reset_prefix_cache()
            try:
                seconds[name].append(timed(partial(runs[name], prompts)))
            except Exception as error:
                without[name] = f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:60]}"
    rows: list[Cell] = []
    for name in peers:
        if name in without:
            rows.append((groups, width, name, without[name], without[name], "", ""))
            continue
        own, ours = seconds[name][1:], seconds[OURS][1:]  # the first is a warm-up
        pairs = None if name == OURS or OURS in without else paired(own, ours)
        ratio, p = ("", "") if pairs is None else (str(pairs.ratio), shown_p(pairs.p))
        speed = interval([groups * num_tokens / one for one in own])
        rows.append((groups, width, name, str(speed), ratio, len(own), p))
    return Measured(rows)


TABLE = Table(
    "Concurrency: answers' tokens per second",
    ("groups", "beams", "search", "tokens/s (95 %)", "times our time (95 %)", "n", "p"),
    cells,
    measure,
    f"prompts of 64 tokens, all at once, {MAX_NUM_SEQS} rows at a time in the engine; answers' tokens: groups x tokens "
    "of one hypothesis; all of vLLM's return b answers, transformers and CTranslate2 (in float32, whatever the others "
    f"have) the best; the peers take turns; times: geometric mean of ratios; p: paired t-test of log "
    f"seconds; {CLIENT_LOOP} is not run beyond {MOST_CLIENT_ROWS} rows; EOS ignored",
)
