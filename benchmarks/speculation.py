"""What speculation brings and costs: `python -m benchmarks.speculation`, or a part with `--only steps`.

Committed steps per forward of the target, the same against the quality of the answers, what a verifying step costs
on this machine, and what it holds of the KV cache. Tables go to the terminal and, as JSON, to `--out`.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks.blocks import code_prompts
from benchmarks.common import PAIR, TARGET, alternate, make_engine, median_ratio, save, settings, show
from benchmarks.stdlib_pair.corpus import held_out_beginnings, held_out_prompts
from vllm_trie import beam_params
from vllm_trie.engine.stats import SearchCounts

Rows = Iterator[tuple[Any, ...]]

STEPS_COLUMNS = ("beams", "draft width", "layers", "steps per forward", "drafted per step", "accepted of drafted")
STEPS_WIDTHS, STEPS_FACTORS, STEPS_LAYERS = (1, 2, 4, 8), (1, 2, 4), (2, 4)
STEPS_PROMPTS, STEPS_TOKENS = 16, 64

QUALITY_COLUMNS = ("law", "beams", "draft width", "steps per forward", "mean width", "mean log p", "next line, %")
QUALITY_PROMPTS, QUALITY_SEEDS, QUALITY_TOKENS, QUALITY_LAYERS, QUALITY_DRAFTS = 32, 3, 24, 3, 6
QUALITY_TEMPERATURE = 0.7

COST_COLUMNS = (
    "layers of the target",
    "parameters, draft / target",
    "steps per forward",
    "ms, plain step",
    "ms, speculative step",
    "break-even steps per forward",
    "speed-up here",
    "speed-up if memory-bound (modelled)",
)
COST_DEPTHS, COST_LAYERS, COST_WIDTH, COST_DRAFTS, COST_PROMPTS, COST_TOKENS = (1, 4, 16), 4, 4, 8, 2, 32

BLOCKS_COLUMNS = ("search", "beams", "draft width", "peak blocks", "times plain beams")
BLOCKS_PROMPTS, BLOCKS_PROMPT_TOKENS, BLOCKS_TOKENS, BLOCKS_LAYERS = 2, 256, 96, 3


def engine_with_draft(num_layers: int, **options: Any) -> Any:
    """The trained pair, in this process."""
    draft = {"method": "draft_model", "model": str(PAIR / "draft"), "num_speculative_tokens": num_layers}
    return make_engine(in_process=True, enforce_eager=True, speculative_config=draft, **options)


def stop(llm: Any) -> None:
    """Give back what an engine in this process holds."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()


def total_counts(outputs: Sequence[Any]) -> SearchCounts:
    """What several searches took together."""
    total = SearchCounts()
    for output in outputs:
        told = output.kv_transfer_params["trie_beam"]
        total.add(SearchCounts(**{count.name: told[count.name] for count in fields(SearchCounts)}))
    return total


def one_at_a_time(llm: Any, prompts: Sequence[Any], params: Sequence[Any]) -> list[Any]:
    """Outputs of searches that share nothing, so that each is granted all it can use."""
    return [
        llm.generate([prompt], own, use_tqdm=False)[0]
        for prompt, own in tqdm(list(zip(prompts, params, strict=True)), leave=False, mininterval=1)
    ]


def steps_per_forward() -> Rows:
    """How many steps of plain beam search one forward of the target commits."""
    prompts = held_out_prompts(STEPS_PROMPTS)
    for num_layers in STEPS_LAYERS:
        llm = engine_with_draft(num_layers)
        for width in STEPS_WIDTHS:
            for factor in STEPS_FACTORS:
                params = beam_params(width, max_tokens=STEPS_TOKENS, speculation="exact", draft_width=factor * width)
                counts = total_counts(one_at_a_time(llm, prompts, [params] * len(prompts)))
                yield (
                    width,
                    factor * width,
                    num_layers,
                    counts.steps_per_forward,
                    counts.drafted / counts.steps,
                    counts.accepted / counts.drafted,
                )
        stop(llm)


def quality() -> Rows:
    """Speed against quality of the laws, as in the DSBD paper's Figure 4."""
    llm = engine_with_draft(QUALITY_LAYERS)
    beginnings = held_out_beginnings(QUALITY_PROMPTS)
    drawn = {"do_sample": True, "temperature": QUALITY_TEMPERATURE}
    fixed = [("speculative beam sampling", width, {**drawn, "draft_width": QUALITY_DRAFTS}) for width in (1, 2, 3, 4)]
    dynamic = [
        (
            f"dynamic width, threshold {threshold}, at least {least}",
            4,
            {**drawn, "draft_width": QUALITY_DRAFTS, "threshold": threshold, "min_width": least},
        )
        for threshold in (0.7, 0.9)
        for least in (1, 2, 3)
    ]
    plain = [("beam sampling", width, {**drawn, "speculation": "off"}) for width in (1, 2, 4)]
    single = [("speculative decoding of one sequence", 1, {**drawn, "draft_width": 1})]
    exact = [("speculative beam search, exact", 4, {"draft_width": QUALITY_DRAFTS})]
    for law, width, options in (*plain, *single, *fixed, *dynamic, *exact):
        jobs = [(one, seed) for one in beginnings for seed in range(QUALITY_SEEDS if "do_sample" in options else 1)]
        params = [
            beam_params(
                width, max_tokens=QUALITY_TOKENS, **options, **({"seed": seed} if "do_sample" in options else {})
            )
            for _, seed in jobs
        ]
        outputs = one_at_a_time(llm, [one.prompt for one, _ in jobs], params)
        answers = [output.outputs[0] for output in outputs]
        speculates = options.get("speculation") != "off"
        counts = total_counts(outputs) if speculates else None
        hits = [
            answer.text.lstrip("\n").split("\n")[0].strip() == one.next_line
            for answer, (one, _) in zip(answers, jobs, strict=True)
        ]
        yield (
            law,
            width,
            options.get("draft_width", ""),
            1.0 if counts is None else counts.steps_per_forward,
            float(width) if counts is None else counts.mean_width,
            statistics.fmean(answer.cumulative_logprob / len(answer.token_ids) for answer in answers),
            100 * statistics.fmean(hits),
        )
    stop(llm)


def deepened(times: int, folder: Path) -> Path:
    """The target with layers that change nothing: their output projections are zero, so answers stay the same."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    source = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    config = AutoConfig.from_pretrained(TARGET)
    depth = config.num_hidden_layers
    config.num_hidden_layers = times * depth
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(source.state_dict(), strict=False)
    assert not unexpected
    assert len(missing) == (times - 1) * depth * len(list(source.model.layers[0].parameters()))
    with torch.no_grad():
        for layer in model.model.layers[depth:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(folder)
    return folder


def cost(repeats: int) -> Rows:
    """What a speculative step costs against a plain one, for targets ever deeper than the draft."""
    from transformers import AutoModelForCausalLM

    draft_size = AutoModelForCausalLM.from_pretrained(PAIR / "draft").num_parameters()
    prompts = held_out_prompts(COST_PROMPTS)
    answers = set()
    for times in COST_DEPTHS:
        with tempfile.TemporaryDirectory() as folder:
            target = deepened(times, Path(folder))
            size = AutoModelForCausalLM.from_pretrained(target).num_parameters()
            llm = engine_with_draft(COST_LAYERS, model=target)
        options = {"max_tokens": COST_TOKENS, "ignore_eos": True}
        plain = beam_params(COST_WIDTH, speculation="off", **options)
        speculative = beam_params(COST_WIDTH, speculation="exact", draft_width=COST_DRAFTS, **options)
        runs: dict[str, Callable[[], Any]] = {
            "plain": lambda llm=llm, params=plain: one_at_a_time(llm, prompts, [params] * len(prompts)),
            "speculative": lambda llm=llm, params=speculative: one_at_a_time(llm, prompts, [params] * len(prompts)),
        }
        outputs = {name: run() for name, run in runs.items()}
        answers.add(tuple(tuple(o.outputs[0].token_ids) for outputs_of in outputs.values() for o in outputs_of))
        counts = total_counts(outputs["speculative"])
        seconds = alternate(runs, repeats)
        per_plain = statistics.median(seconds["plain"]) / counts.steps
        per_speculative = statistics.median(seconds["speculative"]) / counts.target_forwards
        per_forward = counts.steps_per_forward
        yield (
            f"{times}x",
            draft_size / size,
            per_forward,
            1000 * per_plain,
            1000 * per_speculative,
            per_speculative / per_plain,
            median_ratio(seconds["plain"], seconds["speculative"]),
            per_forward / (1 + COST_LAYERS * draft_size / size),
        )
        stop(llm)
    assert len(answers) == 1, "a deeper target answered differently"


def blocks() -> Rows:
    """Peak blocks of one search, with its lent blocks."""
    llm = engine_with_draft(BLOCKS_LAYERS)
    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    prompts = code_prompts(llm, BLOCKS_PROMPTS, BLOCKS_PROMPT_TOKENS)
    options = {"max_tokens": BLOCKS_TOKENS, "ignore_eos": True}
    drawn = {"do_sample": True, "seed": 1}
    for width in (4, 8):
        searches: list[tuple[str, dict[str, Any]]] = [("plain beams", {"speculation": "off"})]
        searches += [("speculative, exact", {"draft_width": factor * width}) for factor in (1, 2, 4)]
        searches += [
            ("beam sampling", {**drawn, "speculation": "off"}),
            ("speculative beam sampling", {**drawn, "draft_width": 2 * width}),
            ("the same, memory_mode", {**drawn, "draft_width": 2 * width, "memory_mode": True}),
        ]
        least = 0
        for name, own in searches:
            held = 0
            for prompt in prompts:
                manager.peak_group_blocks = 0
                llm.generate([{"prompt_token_ids": prompt}], beam_params(width, **options, **own), use_tqdm=False)
                held += manager.peak_group_blocks
            least = least or held
            yield name, width, own.get("draft_width", ""), held, held / least
    stop(llm)


class Bench(NamedTuple):
    title: str
    columns: tuple[str, ...]
    rows: Callable[[int], Rows]
    note: str


BENCHES = {
    "steps": Bench(
        f"Committed steps per forward of the target, {STEPS_PROMPTS} held-out prompts x {STEPS_TOKENS} tokens",
        STEPS_COLUMNS,
        lambda _: steps_per_forward(),
        "plain beam search's answers; one search at a time",
    ),
    "quality": Bench(
        f"Speed against quality, {QUALITY_PROMPTS} held-out prompts x {QUALITY_SEEDS} seeds x {QUALITY_TOKENS} tokens",
        QUALITY_COLUMNS,
        lambda _: quality(),
        f"layers={QUALITY_LAYERS}, temperature={QUALITY_TEMPERATURE}; mean log p: raw, of the best answer's tokens; "
        "next line: its first line is the held-out one",
    ),
    "cost": Bench(
        f"Cost of a speculative step, {COST_WIDTH} beams, {COST_DRAFTS} drafts x {COST_LAYERS} layers, "
        f"{COST_PROMPTS} prompts x {COST_TOKENS} tokens",
        COST_COLUMNS,
        cost,
        "plain beam search's answers, the same at every depth; modelled: a forward costs what its parameters cost to "
        "read, however many tokens it verifies",
    ),
    "blocks": Bench(
        f"Peak KV blocks, {BLOCKS_PROMPTS} prompts x {BLOCKS_PROMPT_TOKENS} tokens, {BLOCKS_TOKENS} new tokens",
        BLOCKS_COLUMNS,
        lambda _: blocks(),
        f"layers={BLOCKS_LAYERS}; blocks of the group, those lent for a step and those not yet reclaimed included",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=[*BENCHES])
    parser.add_argument("--repeats", type=int, default=5, help="alternations per timing; medians are shown")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the JSON files")
    args = parser.parse_args()
    os.environ.setdefault("TQDM_MININTERVAL", "1")
    for name in args.only:
        bench = BENCHES[name]
        note = f"{bench.note}; {settings(enforce_eager=True)}"
        rows = list(tqdm(bench.rows(args.repeats), desc=name, unit="row", leave=False))
        show(bench.title, bench.columns, rows, note)
        save(args.out, f"speculation_{name}", bench.columns, rows, note)


if __name__ == "__main__":
    main()
