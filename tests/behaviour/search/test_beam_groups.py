"""Groups of beams find what transformers 4 finds by group beam search."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.support.disturb import Unlucky
from tests.support.engine import BLOCK_SIZE, TRAINED_TARGET, Engine, Engines
from tests.support.group_loop import loop_group_beams
from tests.support.items import random_items
from tests.support.pairs import drafting
from tests.support.reference import Answer, agree, engine_answers, is_greedy, load
from tests.support.running import BYTES_PER_BLOCK, MOST_TIES, count_ties, prompt_of, run
from tools.record_group_beams import ITEMS as RECORDED_ITEMS
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

RECORD = json.loads(Path(__file__).with_name("group_beams.json").read_text())
SEARCHES: list[dict[str, Any]] = RECORD["searches"]
MAX_TOKENS = 32
RENAMED = {"num_beams": "width", "num_beam_groups": "num_groups", "diversity_penalty": "penalty"}
RENAMED |= {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
ALONG = {"allowed_sequences": [[*item] for item in RECORDED_ITEMS], "catalog_stop": True}


def stops_of(options: dict[str, Any]) -> tuple[int, ...]:
    stops = options.get("eos_token_id", 1)
    return () if stops is None else (stops,) if isinstance(stops, int) else tuple(stops)


def recorded(search: dict[str, Any]) -> list[Answer]:
    answers = zip(search["token_ids"], search["scores"], strict=True)
    return [Answer(without_stop(tokens, stops_of(search["options"])), score) for tokens, score in answers]


def without_stop(tokens: list[int], stops: tuple[int, ...]) -> list[int]:
    """transformers returns the first of all stop tokens, whichever it was."""
    return tokens[:-1] if tokens[-1] in stops else tokens


def params_of(search: dict[str, Any]) -> SamplingParams:
    renamed = {"num_beams": "beam_width", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
    options = {renamed.get(name, name): value for name, value in search["options"].items() if name != "eos_token_id"}
    stops = stops_of(search["options"])
    own = {"ignore_eos": 1 not in stops, "stop_token_ids": [token for token in stops if token != 1]}
    own |= ALONG if options.pop("along_items", False) else {}
    return beam_params(n=options["beam_width"], **{"max_tokens": MAX_TOKENS} | options | own)


def test_the_model_is_the_one_of_the_record() -> None:
    for search in SEARCHES:
        with torch.inference_mode():
            logits = load(TRAINED_TARGET)(torch.tensor([search["prompt"]])).logits[0, -1]
        found = [logits.max().item(), logits.min().item(), logits.sum().item()]
        assert found == pytest.approx(search["logits"], rel=1e-4)


@pytest.mark.nightly
def test_the_loop_finds_what_transformers_4_finds() -> None:
    in_full = 0
    for search in SEARCHES[::5]:
        options = {RENAMED.get(name, name): value for name, value in search["options"].items()}
        stops = stops_of(options)
        options.pop("eos_token_id", None)
        options |= {"items": RECORDED_ITEMS} if options.pop("along_items", False) else {}
        options = {"max_tokens": MAX_TOKENS, "stops": stops, "padding": (*stops, 1)[0]} | options
        found = loop_group_beams(TRAINED_TARGET, search["prompt"], **options)
        in_full += agree([Answer(without_stop(a.token_ids, stops), a.score) for a in found], recorded(search))
    assert in_full >= (1 - MOST_TIES) * len(SEARCHES[::5])


def test_the_engine_finds_what_transformers_4_finds_in_a_batch_with_ordinary_requests(engines: Engines) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    jobs = [(search["prompt"], params) for search in SEARCHES for params in (params_of(search), greedy)]
    outputs, in_full = run(engines(TRAINED_TARGET), jobs), 0
    for search, output, ordinary in zip(SEARCHES, outputs[::2], outputs[1::2], strict=True):
        ours = engine_answers(output, search["options"].get("length_penalty", 1.0))
        stops = stops_of(search["options"])
        ours = [Answer(without_stop(answer.token_ids, stops), answer.score) for answer in ours]
        in_full += agree(ours, recorded(search))
        assert is_greedy(TRAINED_TARGET, search["prompt"], list(ordinary.outputs[0].token_ids), MAX_TOKENS)
    assert in_full >= (1 - MOST_TIES) * len(SEARCHES)


# Random models, whose EOS comes up often.

GROUPS = [(2, 2), (4, 2), (6, 3), (4, 4), (8, 2), (9, 3)]
OF_LOOP = {"items", "items_end", "stops"}


def searches(seed: int = 0) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts, and arguments of `loop_group_beams`."""
    choose = random.Random(seed)
    found = []
    for number, (width, num_groups) in enumerate(GROUPS * 2):
        options: dict[str, Any] = {"width": width, "num_groups": num_groups, "penalty": choose.choice([0.3, 1.0, 4.0])}
        options["length_penalty"] = choose.choice([0.0, 1.0, 2.0])
        options["early_stopping"] = choose.choice([True, False, "never"])
        options["max_tokens"] = choose.choice([1, 2, 20, BLOCK_SIZE + 5])
        options["min_tokens"] = min(choose.choice([0, 0, 5]), options["max_tokens"])
        options["no_repeat_ngram_size"] = choose.choice([0, 0, 1, 2])
        found.append((prompt_of(choose.choice([1, BLOCK_SIZE - 1, 50]), number), options))
    return found


def along(seed: int) -> list[tuple[list[int], dict[str, Any]]]:
    """The same along items, of which some begin others, and which are fewer than the beams of some groups."""
    choose, many = random.Random(seed), random_items(300, [1, 2, 3, 5])
    many = sorted({*many, *(item[:2] for item in many[::3])})
    found = []
    for prompt, options in searches(seed):
        own: dict[str, Any] = {"items": choose.choice([many, many, [(5, 6, 7), (5, 6), (8, 9, 10, 11)]])}
        own |= {"max_tokens": choose.choice([3, 4, 8]), "min_tokens": choose.choice([0, 0, 2])}
        if choose.random() < 0.5:
            own |= {"items_end": True, "stops": ()}
        found.append((prompt, options | own))
    return found


def asked(options: dict[str, Any], **more: Any) -> SamplingParams:
    own = {"width": "beam_width", "num_groups": "num_beam_groups", "penalty": "diversity_penalty"}
    said = {own.get(name, name): value for name, value in options.items() if name not in OF_LOOP}
    if "items" in options:
        said["catalog_stop"] = not options.get("items_end")
        said["allowed_sequences"] = [[*item] for item in options["items"]]
    return beam_params(**said, n=options["width"], ignore_eos=options.get("stops") == (), **more)


def check(engine: Engine, model: Path, cases: list[tuple[list[int], dict[str, Any]]], **more: Any) -> list[Any]:
    outputs, in_full = run(engine, [(prompt, asked(options, **more)) for prompt, options in cases]), 0
    for (prompt, options), output in zip(cases, outputs, strict=True):
        output.outputs = [hypothesis for hypothesis in output.outputs if hypothesis.token_ids]
        ours = engine_answers(output, options["length_penalty"])
        in_full += agree(ours, loop_group_beams(model, prompt, **options))
    assert in_full >= (1 - MOST_TIES) * len(cases)
    return outputs


@pytest.mark.parametrize(("is_async", "logprobs"), [(False, 0), (True, None)])
def test_a_random_model_finds_what_the_loop_finds(
    engines: Engines, random_model: Callable[[str], Path], is_async: bool, logprobs: int | None
) -> None:
    """Where log-probabilities are reported, those of a hypothesis sum up to what it competes by."""
    model = random_model("gqa")
    check(engines(model, async_scheduling=is_async), model, searches(), logprobs=logprobs)


@pytest.mark.parametrize(("is_async", "logprobs", "seed"), [(False, 0, 1), (True, None, 2)])
def test_along_items_a_random_model_finds_what_the_loop_finds(
    engines: Engines, random_model: Callable[[str], Path], is_async: bool, logprobs: int | None, seed: int
) -> None:
    model, cases = random_model("gqa"), along(seed)
    outputs = check(engines(model, async_scheduling=is_async), model, cases, logprobs=logprobs)
    missing = [len(output.outputs) < options["width"] for (_, options), output in zip(cases, outputs, strict=True)]
    assert 0 < sum(missing) < len(missing), "some groups run out of items"


@pytest.mark.parametrize("cases", [searches(), along(1)], ids=["free", "along items"])
def test_groups_that_are_done_count_as_padding(random_model: Callable[[str], Path], cases: Any) -> None:
    """Or the comparisons above would not tell."""
    model = random_model("gqa")
    counted, not_counted = (
        [loop_group_beams(model, prompt, **options, counts_padding=counts) for prompt, options in cases]
        for counts in (True, False)
    )
    assert counted != not_counted


def test_a_group_that_items_have_ended_is_known_before_the_next_step(
    engines: Engines, random_model: Callable[[str], Path]
) -> None:
    """The first group is done after a token, and the second one need not avoid what it would take next."""
    model, prompt = random_model("gqa"), prompt_of(20)
    with torch.inference_mode():
        *best, third, fourth = (2 + load(model)(torch.tensor([prompt])).logits[0, -1, 2:].topk(4).indices).tolist()
    items = [*((token,) for token in best), *((token, 9, 9) for token in best), (third, 9), (fourth, 9)]
    options = {"width": 4, "num_groups": 2, "penalty": 50.0, "max_tokens": 3, "early_stopping": True}
    options |= {"length_penalty": 1.0, "items": items, "items_end": True, "stops": ()}
    (output,) = check(engines(model), model, [(prompt, options)])
    assert [[*o.token_ids] for o in output.outputs[:2]] == [[token] for token in best]


def test_no_more_rows_are_kept_than_each_group_has_items(engines: Engines, random_model: Callable[[str], Path]) -> None:
    engine = engines(random_model("gqa"), num_gpu_blocks_override=40)  # with a row per beam it starves
    options = {"allowed_sequences": [prompt_of(40, 3), prompt_of(40, 4)], "max_tokens": 48, "n": 6}
    (output,) = engine.generate([prompt_of(9)], beam_params(30, num_beam_groups=3, diversity_penalty=0.5, **options))
    found = [[*o.token_ids] for o in output.outputs]
    assert sorted(found) == sorted(3 * options["allowed_sequences"])


def test_groups_differ_more_than_beams_of_one(engines: Engines, random_model: Callable[[str], Path]) -> None:
    engine, options = engines(random_model("gqa")), {"n": 6, "max_tokens": 20, "ignore_eos": True}
    prompts = [prompt_of(20, seed) for seed in range(5)]
    plain = engine.generate(prompts, beam_params(6, **options))
    diverse = engine.generate(prompts, beam_params(6, num_beam_groups=3, diversity_penalty=3.0, **options))
    alone, apart = (sum(len({o.token_ids[0] for o in one.outputs}) for one in found) for found in (plain, diverse))
    assert apart > 1.5 * alone


def test_a_preempted_search_finds_the_same(engines: Engines, random_model: Callable[[str], Path]) -> None:
    model = random_model("gqa")
    engine = engines(model, kv_cache_memory_bytes=60 * BYTES_PER_BLOCK, max_num_seqs=40)
    jobs = [(prompt, asked(options)) for prompt, options in (*searches(1), *along(1))]
    expected, unlucky = run(engine, jobs), Unlucky(engine, share=0.3)
    found = run(engine, jobs, unlucky.preempt_the_last)
    assert unlucky.num_preempted > 5
    assert count_ties(found, expected) <= MOST_TIES * sum(len(output.outputs) for output in expected)


def test_an_engine_that_drafts_searches_in_groups_by_plain_steps(
    engines: Engines, random_pair: Callable[[str, float], tuple[Path, Path]]
) -> None:
    target, draft = random_pair("gqa", 0.012)
    outputs = check(engines(target, **drafting(draft, 2)), target, [*searches(2)[:4], *along(2)[:4]])
    assert not any("steps_per_forward" in str(output.kv_transfer_params) for output in outputs)
