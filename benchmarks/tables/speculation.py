"""What speculation brings and costs: steps per forward, the DSBD paper's Figure 4, time, blocks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import models
from benchmarks.common import alternate, generate, median_ratio, one_at_a_time
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.peers.specinfer import TreeSpeculation
from benchmarks.prompts import CODE
from benchmarks.significance import interval, paired
from benchmarks.stdlib_pair.corpus import Beginning, held_out_beginnings
from benchmarks.watch import manager_of, same_answers, total_counts
from vllm_trie import beam_params

TEMPERATURE, SEED, QUALITY_LAYERS, QUALITY_DRAFTS = 0.7, 1, 3, 6
EXPANSIONS = ((1, 1, 1), (6, 1, 1), (3, 2, 1))  # SpecInfer's: children of a node, layer by layer
DRAFT_WIDTHS = {2: 4, 4: 8, 8: 12}  # by beams: those that were the fastest on the deepest target, with 3 layers


def steps_cells(setting: Setting) -> list[Cell]:
    own_widths = setting.pick((2,), (1, 4), (1, 2, 4, 8))
    return [
        (layers, width, factor * width)
        for layers in setting.pick((QUALITY_LAYERS,), (4,), (2, 4))
        for width in setting.widths or own_widths
        for factor in setting.pick((2,), (1, 2, 4), (1, 2, 4))
    ]


def measure_steps(bench: Bench, num_layers: int, width: int, draft_width: int) -> Measured:
    """How many steps of plain beam search one forward of the target commits."""
    setting = bench.setting
    llm = bench.engine_with_draft(num_layers)
    prompts = [{"prompt_token_ids": prompt} for prompt in bench.prompts(setting.pick(1, 4, 16))]
    params = beam_params(
        width, max_tokens=setting.max_tokens or setting.pick(8, 48, 64), speculation="exact", draft_width=draft_width
    )
    outputs = one_at_a_time(llm, prompts, params)
    counts = total_counts(outputs)
    each = [total_counts([output]).steps_per_forward for output in outputs]
    row = (
        width,
        draft_width,
        num_layers,
        counts.steps_per_forward,
        str(interval(each)),
        counts.drafted / counts.steps,
        counts.accepted / counts.drafted,
        len(prompts),
    )
    return Measured([row])


STEPS = Table(
    "Search steps per forward of the target",
    (
        "beams",
        "draft width",
        "layers",
        "steps per forward",
        "by prompt (95 %)",
        "drafted per step",
        "accepted of drafted",
        "n",
    ),
    steps_cells,
    measure_steps,
    "plain beam search's answers; one search at a time; the prompt's forward is not counted",
    needs_draft=True,
)

MODES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"beam sampling, {width}": (width, {"do_sample": True, "speculation": "off"}) for width in (1, 2, 4)},
    "one sequence, speculative decoding": (1, {"do_sample": True, "draft_width": 1}),
    **{
        f"speculative beam sampling, {width}": (width, {"do_sample": True, "draft_width": QUALITY_DRAFTS})
        for width in (1, 2, 3, 4)
    },
    **{
        f"dynamic width, threshold {threshold}, at least {least}": (
            4,
            {"do_sample": True, "draft_width": QUALITY_DRAFTS, "threshold": threshold, "min_width": least},
        )
        for threshold in (0.7, 0.9)
        for least in (1, 2, 3)
    },
    "speculative beam search, exact": (4, {"speculation": "exact", "draft_width": QUALITY_DRAFTS}),
}
SPECINFER = "SpecInfer, tree"


def quality_cells(setting: Setting) -> list[Cell]:
    modes = [(mode,) for mode in MODES]
    trees = [(f"{SPECINFER} {'-'.join(map(str, expansion))}",) for expansion in EXPANSIONS]
    few = [modes[0], modes[-1], trees[0]]
    return setting.pick(few, modes + trees, modes + trees)


def measure_quality(bench: Bench, mode: str) -> Measured:
    """Steps per forward, and the answers' log p and first lines, of one mode."""
    setting = bench.setting
    num_tokens = setting.max_tokens or setting.pick(6, 24, 24)
    count = setting.pick(2, 6, 32)
    prompts = bench.prompts(count)
    if mode in MODES:
        width, options = MODES[mode]
        llm = bench.engine_with_draft(QUALITY_LAYERS)
        sampled = {"seed": SEED, "temperature": TEMPERATURE} if "do_sample" in options else {}
        params = beam_params(width, max_tokens=num_tokens, **options, **sampled)
        outputs = one_at_a_time(llm, [{"prompt_token_ids": prompt} for prompt in prompts], params)
        logs = [o.outputs[0].cumulative_logprob / len(o.outputs[0].token_ids) for o in outputs]
        texts = [output.outputs[0].text for output in outputs]
        counts = None if options.get("speculation") == "off" else total_counts(outputs)
        per_forward = 1.0 if counts is None else counts.steps_per_forward
        mean_width = float(width) if counts is None else counts.mean_width
    else:
        logs, texts, per_forward = _specinfer(bench, mode, prompts, num_tokens)
        mean_width = 1.0
    hits = [
        text.lstrip("\n").split("\n")[0].strip() == one.next_line
        for text, one in zip(texts, _known(bench, count), strict=False)
    ]
    row = (
        mode,
        per_forward,
        mean_width,
        str(interval(logs)),
        100 * statistics.fmean(hits) if hits else "",
        count,
    )
    return Measured([row], {"point": [per_forward, statistics.fmean(logs)]})


def _known(bench: Bench, count: int) -> list[Beginning]:
    """The built-in prompts with the line that follows; of others nobody knows it."""
    return held_out_beginnings(count) if bench.setting.prompts[0] == CODE else []


def _specinfer(
    bench: Bench, mode: str, prompts: Sequence[list[int]], num_tokens: int
) -> tuple[list[float], list[str], float]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bench.setting.model)
    expansion = [int(children) for children in mode.removeprefix(SPECINFER).split("-")]
    peer = TreeSpeculation(bench.reference(), bench.reference_draft(), expansion, TEMPERATURE)
    found = [peer.generate(prompt, num_tokens, tokenizer.eos_token_id, SEED) for prompt in prompts]
    return (
        [math.fsum(one.logprobs) / len(one.tokens) for one in found],
        [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in found],
        sum(len(one.tokens) for one in found) / sum(one.target_forwards for one in found),
    )


QUALITY = Table(
    "Speed against quality",
    ("mode", "steps per forward", "mean width", "mean log p (95 %)", "next line, %", "n"),
    quality_cells,
    measure_quality,
    f"layers={QUALITY_LAYERS}, {QUALITY_DRAFTS} drafts in each (one sequence: 1), temperature={TEMPERATURE}; mean log "
    "p: raw, of the best answer's tokens; next line: its first line is the held-out one; SpecInfer: one sequence, "
    "trees of so many children by layer, in transformers",
    needs_draft=True,
)


def cost_cells(setting: Setting) -> list[Cell]:
    depths = setting.pick((1,), (1,), (1, 4, 16)) if setting.is_toy else (1,)
    widths = setting.pick((4,), (2, 4), (2, 4, 8))
    return [(QUALITY_LAYERS, times, width) for times in depths for width in widths]


def measure_cost(bench: Bench, num_layers: int, times: int, width: int) -> Measured:
    """What a speculative step costs against a plain one, on a target so many times deeper than the model."""
    setting = bench.setting
    variant = models.deeper(times)
    llm = bench.engine_with_draft(num_layers, variant=variant)
    prompts = [{"prompt_token_ids": prompt} for prompt in bench.prompts(setting.pick(1, 2, 4))]
    options = {"max_tokens": setting.max_tokens or setting.pick(6, 32, 32), "ignore_eos": True}
    own = {
        "plain": beam_params(width, speculation="off", **options),
        "speculative": beam_params(width, speculation="exact", draft_width=DRAFT_WIDTHS[width], **options),
    }
    runs: dict[str, Callable[[], Any]] = {
        name: lambda params=params: one_at_a_time(llm, prompts, params) for name, params in own.items()
    }
    outputs = {name: run() for name, run in runs.items()}
    same = same_answers(outputs["speculative"], outputs["plain"], setting.dtype)
    counts = total_counts(outputs["speculative"])
    seconds = alternate(runs, setting.repeats)
    steps_per_forward = counts.steps / counts.target_forwards
    per_plain = statistics.median(seconds["plain"]) / counts.steps
    per_speculative = statistics.median(seconds["speculative"]) / counts.target_forwards
    ratio = _num_read(bench.reference_draft()) / _num_read(bench.reference(variant))
    row = (
        f"{times}x",
        width,
        num_layers,
        DRAFT_WIDTHS[width],
        ratio,
        steps_per_forward,
        1000 * per_plain,
        1000 * per_speculative,
        per_speculative / per_plain,
        str(paired(seconds["plain"], seconds["speculative"]).ratio),
        steps_per_forward / (1 + num_layers * ratio),
        same,
    )
    return Measured([row])


def _num_read(model: Any) -> int:
    """Parameters that a forward reads: of input embeddings that are nothing else it reads a row for each token."""
    embeddings = model.get_input_embeddings().weight
    is_output_too = embeddings is model.get_output_embeddings().weight
    return model.num_parameters() - (0 if is_output_too else embeddings.numel())


COST = Table(
    "Cost of a speculative step",
    (
        "depth of the target",
        "beams",
        "layers of drafts",
        "drafts in a layer",
        "parameters, draft / target",
        "steps per forward",
        "ms, plain step",
        "ms, speculative step",
        "break-even steps per forward",
        "speed-up here (95 %)",
        "speed-up if memory-bound (modelled)",
        "same answers",
    ),
    cost_cells,
    measure_cost,
    "plain beam search's answers; steps and forwards: those of the prompt included; deeper targets have further layers "
    "that change nothing; modelled: a forward costs what its parameters cost to read, however many tokens it verifies",
    needs_draft=True,
)


def auto_cells(setting: Setting) -> list[Cell]:
    depths = setting.pick((1,), (1, 4), (1, 4, 16)) if setting.is_toy else (1,)
    widths = setting.widths or setting.pick((2,), (2, 4, 8), (2, 4, 8))
    return [(setting.pick(QUALITY_LAYERS, 4, 4), times, width) for times in depths for width in widths]


def measure_auto(bench: Bench, num_layers: int, times: int, width: int) -> Measured:
    """What `speculation="auto"` takes against plain beams, and against forests that are as large as they may be."""
    setting = bench.setting
    llm = bench.engine_with_draft(num_layers, variant=models.deeper(times))
    prompts = [{"prompt_token_ids": prompt} for prompt in bench.prompts(setting.pick(1, 4, 4))]
    options = {"max_tokens": setting.max_tokens or setting.pick(12, 64, 64), "ignore_eos": True}
    own = {speculation: beam_params(width, speculation=speculation, **options) for speculation in WAYS}
    runs: dict[str, Callable[[], object]] = {
        name: lambda params=params: one_at_a_time(llm, prompts, params) for name, params in own.items()
    }
    found = {name: one_at_a_time(llm, prompts, params) for name, params in own.items()}
    same = [same_answers(found[name], found["off"], setting.dtype) for name in WAYS[1:]]
    seconds = alternate(runs, max(setting.repeats, setting.pick(1, 5, 7)))
    per_forward = [total_counts(one_at_a_time(llm, prompts, own[name])).steps_per_forward for name in WAYS[1:]]
    of_plain = statistics.median(seconds["off"]) / (len(prompts) * options["max_tokens"])
    ratios = [median_ratio(seconds[name], seconds["off"]) for name in WAYS[1:]]
    return Measured([(f"{times}x", width, 1000 * of_plain, *per_forward, *ratios, *same)])


WAYS = ("off", "exact", "auto")
AUTO = Table(
    "Speculation that follows what pays",
    (
        "depth of the target",
        "beams",
        "ms, plain step",
        "steps per forward, exact",
        "steps per forward, auto",
        "time, exact over plain",
        "time, auto over plain",
        "same answers, exact",
        "same answers, auto",
    ),
    auto_cells,
    measure_auto,
    "plain beam search's answers; one search at a time; exact: forests of the default size in every step; auto goes on "
    "from what it has learned from the searches before; in turn, medians of ratios; deeper targets have further layers "
    "that change nothing",
    needs_draft=True,
)


def blocks_cells(setting: Setting) -> list[Cell]:
    return [(width,) for width in setting.widths or setting.pick((2,), (4,), (4, 8))]


def measure_blocks(bench: Bench, width: int) -> Measured:
    """Peak blocks of one search, lookahead blocks included."""
    setting = bench.setting
    llm = bench.engine_with_draft(QUALITY_LAYERS)
    manager = manager_of(llm)
    prompts = bench.prompts(setting.pick(1, 2, 4), 256)
    options = {"max_tokens": setting.max_tokens or setting.pick(8, 96, 96), "ignore_eos": True}
    sampled = {"do_sample": True, "seed": 1}
    searches: list[tuple[str, dict[str, Any]]] = [("plain beams", {"speculation": "off"})]
    exact = {"speculation": "exact"}
    searches += [("speculative, exact", {**exact, "draft_width": factor * width}) for factor in (1, 2, 4)]
    searches += [
        ("beam sampling", {**sampled, "speculation": "off"}),
        ("speculative beam sampling", {**sampled, "draft_width": 2 * width}),
        ("the same, memory_mode", {**sampled, "draft_width": 2 * width, "memory_mode": True}),
    ]
    rows: list[Cell] = []
    for name, own in searches:
        held = 0
        for prompt in prompts:
            manager.peak_group_blocks = 0
            generate(llm, [{"prompt_token_ids": prompt}], beam_params(width, **options, **own))
            held += manager.peak_group_blocks
        least = rows[0][3] if rows else held
        rows.append((name, width, own.get("draft_width", ""), held, held / least))
    return Measured(rows)


BLOCKS = Table(
    "Peak KV blocks of speculation",
    ("search", "beams", "draft width", "peak blocks", "times plain beams"),
    blocks_cells,
    measure_blocks,
    f"layers={QUALITY_LAYERS}; prompts of 256 tokens, peaks of all summed; blocks of the group, lookahead blocks and "
    "those not yet reclaimed included",
    needs_draft=True,
)
