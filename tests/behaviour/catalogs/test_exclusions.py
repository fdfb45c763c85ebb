"""Excluded items are as good as never in the catalog: transformers' beams without them, and those of what is left."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.disturb import preempt_all
from tests.support.engine import Engine, Engines
from tests.support.items import Item, along, random_items
from tests.support.pairs import TRAINED, speculating, steps_per_forward
from tests.support.reference import agree, engine_answers, transformers_beams, transformers_greedy
from tests.support.running import MOST_TIES, count_ties, prompt_of, run, trained_prompts
from tests.support.sweep import sweep
from vllm_trie import beam_params, hypotheses, load_item_list
from vllm_trie.catalog import Catalog
from vllm_trie.engine import catalogs as engine_catalogs
from vllm_trie.engine.catalog_exclusion import item_list_digest
from vllm_trie.entrypoints.requests.catalogs import _looked_up_exclusion
from vllm_trie.entrypoints.requests.refusals import BeamRequestError
from vllm_trie.messages import NO_HYPOTHESIS

pytestmark = pytest.mark.slow

NESTED = random_items(300, [2, 3, 4], tokens=(2, 60))
NESTED = sorted({*NESTED, *(item[:2] for item in NESTED[::7])})  # some begin others
FLAT = random_items(60, [3], seed=1, tokens=(2, 60))
PAIRS = [*product(range(2, 300), range(2, 100))]  # of which one is probable after any token
MANY = random_items(3000, [2, 3, 4, 6])  # or transformers would take what is impossible for a hypothesis
MANY = sorted({*MANY, *(item[:2] for item in MANY[::9])})


@pytest.fixture(scope="module")
def model(random_model: Callable[[str], Path]) -> Path:
    return random_model("gqa")


def with_items(engines: Engines, model: Path, folder: Path, items: list[Item], **options: Any) -> Engine:
    Catalog.from_sequences(items).save(folder / "items.catalog")
    config = {"check_invariants": True, "catalogs": {"items": str(folder / "items.catalog")}}
    if (folder / "blocked.txt").exists():
        config |= {"exclude": {"blocked": str(folder / "blocked.txt")}, "catalog_folder": str(folder)}
    return engines(model, additional_config={"trie_beam": config}, **options)


def some_of(items: list[Item], seed: int, share: float = 0.5) -> list[int]:
    """Indices of items: of all that begin alike, too."""
    choose = random.Random(seed)
    return [at for at, item in enumerate(items) if item[0] % 5 == seed % 5 or choose.random() < share]


def left_of(items: list[Item], excluded: list[int]) -> list[Item]:
    gone = {*excluded}
    return [item for at, item in enumerate(items) if at not in gone]


def test_beams_are_those_of_transformers_without_the_excluded_items(
    engines: Engines, model: Path, tmp_path: Path
) -> None:
    """Each search excludes others, and all are one batch."""
    engine = with_items(engines, model, tmp_path, MANY)
    asked = [(prompt_of(20 + n, n), some_of(MANY, n, share=0.4 * (n % 3))) for n in range(8)]
    params = [
        beam_params(6, n=6, catalog="items", catalog_stop=True, exclude_items=ids, max_tokens=8) for _, ids in asked
    ]
    batches = set[int]()
    outputs = run(
        engine,
        [(prompt, own) for (prompt, _), own in zip(asked, params, strict=True)],
        lambda: batches.add(len(engine.runner.selector._plan.cohorts) if engine.runner.selector._plan else 0),
    )
    assert max(batches) <= 2  # those that begin, and those that go on
    ties = 0
    for (prompt, ids), output in zip(asked, outputs, strict=True):
        left = left_of(MANY, ids)
        theirs = transformers_beams(model, prompt, 6, 6, 8, prefix_allowed_tokens_fn=along(left, prompt))
        ties += not agree(engine_answers(output, 1.0), theirs)
        assert all((*hypothesis.token_ids[:-1],) in {*left} for hypothesis in output.outputs)
    assert ties <= MOST_TIES * len(asked)


FEATURES: dict[str, tuple[list[Item], dict[str, Any]]] = {
    "plain": (NESTED, {}),
    "with a stop": (NESTED, {"catalog_stop": True}),
    "several items": (FLAT, {"catalog_items": 2, "max_tokens": 8}),
    "after a token": (PAIRS, {"catalog_after": ..., "max_tokens": 3}),
    "renormalized": (NESTED, {"catalog_renormalize": True}),
    "in groups": (NESTED, {"num_beam_groups": 2, "diversity_penalty": 0.7}),
    "narrower and wider": (NESTED, {"beam_widths": [2, 6, 3]}),
    "filtered": (FLAT, {"min_p": 0.2, "temperature": 0.8}),
    "pruned, with boosts": (FLAT, {"prune_absolute": 4.0, "phrase_boosts": [([9], 1.5)]}),
    "without repetition": (FLAT, {"no_repeat_ngram_size": 1}),
    "reported": (FLAT, {"logprobs": 2}),
    "as wide as all": (FLAT, {"beam_width": 60, "n": 60}),
}


@pytest.mark.parametrize("case", sweep([*FEATURES], "plain", "several items", "after a token", "in groups", "reported"))
def test_a_search_finds_what_it_finds_in_a_set_of_what_is_left(
    engines: Engines, model: Path, tmp_path: Path, case: str
) -> None:
    items, options = FEATURES[case]
    engine, prompts = with_items(engines, model, tmp_path, items), [prompt_of(20 + n, n) for n in range(4)]
    options = {"beam_width": 6, "n": 6, "max_tokens": 6} | options
    if "catalog_after" in options:
        options["catalog_after"] = transformers_greedy(model, prompts[0], 1)[0]
    excluded = [some_of(items, n, 0.3) for n in range(4)]
    lefts = [[[*item] for item in left_of(items, ids)] for ids in excluded]
    ours = engine.generate(prompts, [beam_params(catalog="items", exclude_items=ids, **options) for ids in excluded])
    theirs = engine.generate(prompts, [beam_params(allowed_sequences=left, **options) for left in lefts])
    assert any(output.outputs[0].token_ids for output in ours)
    for our, their, left in zip(ours, theirs, lefts, strict=True):
        for one, other in zip(our.outputs, their.outputs, strict=True):
            assert list(one.token_ids) == list(other.token_ids)
            assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)
        ids, own = (output.kv_transfer_params["trie_beam"]["item_ids"] for output in (our, their))
        flat = (
            [[*(i if isinstance(i, list) else [i])] for i in ids],
            [[*(i if isinstance(i, list) else [i])] for i in own],
        )
        for one, other in zip(*flat, strict=True):
            assert [items[i] if i >= 0 else None for i in one] == [tuple(left[i]) if i >= 0 else None for i in other]


@pytest.mark.parametrize("stop", [False, True])
def test_drafts_along_a_catalog_know_what_is_excluded(engines: Engines, tmp_path: Path, stop: bool) -> None:
    items = random_items(400, [6, 9, 12], tokens=(200, 260))
    Catalog.from_sequences(items).save(tmp_path / "items.catalog")
    config = {"check_invariants": True, "catalogs": {"items": str(tmp_path / "items.catalog")}}
    engine, excluded = (
        speculating(engines, TRAINED, 3, additional_config={"trie_beam": config}),
        [some_of(items, n, 0.2) for n in range(4)],
    )
    options = {"catalog": "items", "catalog_stop": stop, "max_tokens": 14}
    plain, drafted = (
        engine.generate(
            trained_prompts([24, 30, 37, 64]),
            [beam_params(4, n=4, speculation=speculation, exclude_items=ids, **options) for ids in excluded],
        )
        for speculation in ("off", "exact")
    )
    for ours, theirs, ids in zip(drafted, plain, excluded, strict=True):
        assert agree(engine_answers(ours, 1.0), engine_answers(theirs, 1.0))
        assert {tuple(o.token_ids)[: len(o.token_ids) - stop] for o in ours.outputs} <= {*left_of(items, ids)}
    assert max(map(steps_per_forward, drafted)) > 1.5


def test_a_preempted_search_comes_to_no_excluded_item(
    engines: Engines, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ids = with_items(engines, model, tmp_path, NESTED), some_of(NESTED, 3)
    job = prompt_of(20), beam_params(5, n=5, catalog="items", exclude_items=ids, max_tokens=8)
    expected, steps, catalogs = run(engine, [job]), 0, engine.scheduler.catalogs

    def lose_all_once() -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            preempt_all(engine)
            monkeypatch.setattr(catalogs, "room", 0)
            catalogs.load({})
            monkeypatch.undo()

    assert count_ties(run(engine, [job], lose_all_once), expected) == 0
    left = {*left_of(NESTED, ids)}
    assert all(tuple(hypothesis.token_ids) in left for hypothesis in expected[0].outputs)


def test_where_all_items_are_excluded_the_answer_is_empty(engines: Engines, model: Path, tmp_path: Path) -> None:
    engine, every = with_items(engines, model, tmp_path, NESTED), [*range(len(NESTED))]
    for options in ({}, {"catalog_stop": True}, {"catalog_renormalize": True}, {"catalog_after": 7}):
        (output,) = engine.generate(
            [prompt_of(20)], beam_params(4, n=3, catalog="items", exclude_items=every, max_tokens=8, **options)
        )
        assert [list(hypothesis.token_ids) for hypothesis in output.outputs] == [[], [], []]
        assert {hypothesis.stop_reason for hypothesis in output.outputs} == {NO_HYPOTHESIS}
    (output,) = engine.generate(
        [prompt_of(20)], beam_params(4, catalog="items", exclude_items=every, compact=True, max_tokens=8)
    )
    assert len(hypotheses(output)) == 0


def test_what_requests_exclude_leaves_when_others_come(engines: Engines, model: Path, tmp_path: Path) -> None:
    engine, prompt = with_items(engines, model, tmp_path, NESTED), prompt_of(20)
    catalogs, closed = engine.scheduler.catalogs, engine.runner.catalogs.closed
    for number in range(40):
        engine.generate([prompt], beam_params(2, catalog="items", exclude_items=[number], max_tokens=6))
    engine.generate([prompt], beam_params(2, max_tokens=2))
    assert 0 < len(closed._parts) <= 33  # those of idle ones, and what is there while others leave
    assert {*closed._parts, *engine.runner.catalogs.tries} == {*catalogs.by_digest}
    size = len(closed.codes)
    engine.generate([prompt], beam_params(2, catalog="items", exclude_items=[*range(100)], max_tokens=6))
    assert len(closed.codes) <= 2 * size + 1000


def test_a_new_version_of_a_list_is_taken_and_a_search_under_way_keeps_the_old_one(
    engines: Engines, model: Path, tmp_path: Path
) -> None:
    old, new = some_of(FLAT, 1), some_of(FLAT, 2)
    for name, ids in (("blocked", old), ("newer", new)):
        (tmp_path / f"{name}.txt").write_text("\n".join(map(str, ids)))
    engine = with_items(engines, model, tmp_path, FLAT)
    core, prompt = engine.llm.llm_engine, prompt_of(30)
    params = beam_params(60, n=60, catalog="items", exclude_list="blocked", max_tokens=6)
    core.add_request("before", {"prompt_token_ids": prompt}, params.clone())
    core.step()
    reply = load_item_list(engine.llm, "blocked", "newer.txt")
    assert reply == {"name": "blocked", "items": len(new), "digest": item_list_digest(np.array(sorted(new)))}
    core.add_request("after", {"prompt_token_ids": prompt}, params.clone())
    own = beam_params(60, n=60, catalog="items", exclude_list="blocked", exclude_items=old[:9], max_tokens=6)
    core.add_request("both", {"prompt_token_ids": prompt}, own)
    found: dict[str, set[Item]] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            found.setdefault(output.request_id, set()).update(tuple(o.token_ids) for o in output.outputs if o.token_ids)
    assert found["before"] == {*left_of(FLAT, old)}
    assert found["after"] == {*left_of(FLAT, new)}
    assert found["both"] == {*left_of(FLAT, [*new, *old[:9]])}
    (tmp_path / "wrong.txt").write_text("12\nx\n")
    for name, file, why in (
        ("blocked", "wrong.txt", "wrong.txt, line 2: 'x' is not"),
        ("other", "newer.txt", "exclude_list='other' is unknown; known: blocked"),
        ("blocked", "../newer.txt", "is not in trie_beam.catalog_folder"),
    ):
        with pytest.raises(ValueError, match=why):
            load_item_list(engine.llm, name, file)
    other = str(tmp_path / "blocked.txt")  # as one of several engines may find it
    with pytest.raises(RuntimeError, match="is not the same file for all processes; write a new file"):
        core.engine_core.engine_core.collective_rpc("load_item_list", args=("blocked", other, "another one"))
    assert engine.scheduler.catalogs.lists["blocked"].tolist() == sorted(new)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"exclude_items": [5, 12_345]}, "^exclude_items: 12345 is not an item of this catalog; leave out what"),
    "two unknown": (
        {"exclude_items": [5, 12_345, 12_346]},
        "12345 is not an item of this catalog, nor are 1 more of these ids; leave out",
    ),
    "negative": ({"exclude_items": [-1]}, "^exclude_items: -1 is not an item"),
    "a text": ({"exclude_items": "seen"}, "exclude_items='seen' is not a list of at most 100,000 item ids"),
    "fractions": ({"exclude_items": [1.5]}, r"exclude_items=\[1.5\] is not a list of at most 100,000 item ids"),
    "truth": (
        {"exclude_items": [True]},
        "is not a list of at most 100,000 item ids; pass a list, set or array of integers",
    ),
    "a number": ({"exclude_items": 5}, "exclude_items=5 is not a list"),
    "too many": ({"exclude_items": [*range(100_001)]}, "has 100,001 entries, and may have 100,000; shorten it"),
    "too large": ({"exclude_items": [1 << 70]}, "is not a list of at most 100,000 item ids"),
    "no list": ({"exclude_list": "blocked"}, "exclude_list='blocked' is unknown; this engine has none; start it with"),
    "no catalog": ({"catalog": None, "exclude_items": [1]}, "needs a catalog of items"),
    "a set": ({"catalog": None, "allowed_sequences": [[5]], "exclude_items": [0]}, "needs a catalog"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_excluded_is_refused_and_the_next_request_served(
    engines: Engines, model: Path, tmp_path_factory: pytest.TempPathFactory, case: str
) -> None:
    folder, (options, why) = tmp_path_factory.getbasetemp() / "exclusions", WRONG[case]
    folder.mkdir(exist_ok=True)
    engine, params = with_items(engines, model, folder, NESTED), beam_params(2, max_tokens=6)
    options = {"beam_width": 2, "catalog": "items"} | options
    params.extra_args = {name: value for name, value in options.items() if value is not None}
    with pytest.raises(BeamRequestError, match=why):
        engine.generate([prompt_of(9)], params)
    params.extra_args = {"beam_width": 2, "catalog": "items", "exclude_items": json.dumps([1, 2])}  # as over HTTP
    (output,) = engine.generate([prompt_of(9)], params)
    assert tuple(output.outputs[0].token_ids) in {*left_of(NESTED, [1, 2])}


class Uncopied(list[int]):
    """A list that vLLM must not copy."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("all ids of a request are copied")


def test_ids_are_read_and_looked_up_once_before_parameters_are_copied(
    engines: Engines, model: Path, tmp_path: Path
) -> None:
    engine, params = with_items(engines, model, tmp_path, NESTED), beam_params(2, max_tokens=6)
    ids = [1, 2, 5, 8]
    params.extra_args = {"beam_width": 2, "catalog": "items", "exclude_items": Uncopied(ids)}
    num_read = _looked_up_exclusion.cache_info().misses
    outputs = engine.generate([prompt_of(9 + n, n) for n in range(3)], params)
    assert _looked_up_exclusion.cache_info().misses == num_read + 1
    assert all(tuple(output.outputs[0].token_ids) in {*left_of(NESTED, ids)} for output in outputs)
    assert params.extra_args["exclude_items"] == ids
    params.extra_args["exclude_items"] = ids[::-1]
    engine.generate([prompt_of(9)], params)
    assert _looked_up_exclusion.cache_info().misses == num_read + 1, "equal sets in another order"


def test_a_version_that_is_too_large_for_a_search_refuses_that_one_alone(
    engines: Engines, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt = with_items(engines, model, tmp_path, NESTED), prompt_of(20)
    params = beam_params(2, catalog="items", exclude_items=[1], max_tokens=6)
    monkeypatch.setattr(engine_catalogs, "why_nothing_is_excluded", lambda *_: "catalog_items=1 is too many")
    refused, (other,) = engine.generate([prompt], params)[0], engine.generate([prompt], beam_params(2, max_tokens=6))
    assert refused.outputs[0].finish_reason == "error"
    assert str(refused.outputs[0].stop_reason) == (
        "beam_width=2 cannot use this version of its catalog: catalog_items=1 is too many"
    )
    assert other.outputs[0].finish_reason != "error"
    monkeypatch.undo()
    (output,) = engine.generate([prompt], params)
    assert tuple(output.outputs[0].token_ids) in {*left_of(NESTED, [1])}


def test_more_than_there_is_room_for_is_refused_and_the_next_request_served(
    engines: Engines, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt = with_items(engines, model, tmp_path, NESTED), prompt_of(20)
    params = beam_params(2, catalog="items", exclude_items=[1], max_tokens=6)
    monkeypatch.setattr(engine.scheduler.catalogs, "room", 100)
    (output,) = engine.generate([prompt], params)
    assert output.outputs[0].finish_reason == "error"
    assert "has more excluded items or tables than fit in request_tables_bytes=100 of each device" in str(
        output.outputs[0].stop_reason
    )
    monkeypatch.undo()
    (output,) = engine.generate([prompt], params)
    assert tuple(output.outputs[0].token_ids) in {*left_of(NESTED, [1])}
