"""Beams that go along a catalog: transformers' under the same constraint, and all items where there are few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.support.disturb import preempt_all
from tests.support.engine import TRAINED_TARGET, Engine, Engines
from tests.support.items import EOS, Item, along, random_items
from tests.support.pairs import TRAINED, speculating, steps_per_forward
from tests.support.reference import Answer, agree, engine_answers, load, transformers_beams, transformers_greedy
from tests.support.running import MOST_TIES, count_ties, prompt_of, run, start_with, trained_prompts
from tests.support.sweep import sweep
from vllm_trie import beam_params, hypotheses, load_catalog
from vllm_trie.catalog import Catalog
from vllm_trie.catalog.arrays import CatalogArrays
from vllm_trie.catalog.file_format import CatalogHeader, pack_catalog
from vllm_trie.entrypoints.requests.refusals import BeamRequestError
from vllm_trie.messages import NO_HYPOTHESIS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(random_model: Callable[[str], Path]) -> Path:
    return random_model("gqa")


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("kind", sweep(["gqa", "mha", "trained"], "trained"))
def test_items_with_eos_are_those_of_transformers(
    engines: Engines, random_model: Callable[[str], Path], tmp_path: Path, kind: str, early_stopping: bool | str
) -> None:
    path = TRAINED_TARGET if kind == "trained" else random_model(kind)
    if early_stopping is True:  # else transformers would stop when its pool is full of what is impossible
        items = sorted(product(range(2, 42), range(50, 62), range(62, 102)))
    else:
        items = random_items(3000, [2, 3, 4, 6])
        items = sorted({*items, *(item[:2] for item in items[::9])})  # some begin others
    Catalog.from_sequences(items).save(tmp_path / "items.catalog")
    engine = with_catalogs(engines, path, tmp_path)
    grid = [*product([1, 3, 8, 20], [0.0, 1.0, 2.0])]
    prompts = (
        trained_prompts([20 + n for n in range(len(grid))])
        if kind == "trained"
        else [prompt_of(20 + n, n) for n in range(len(grid))]
    )
    options = {"catalog": "items", "catalog_stop": True, "max_tokens": 8}
    params = [
        beam_params(width, n=width, length_penalty=penalty, early_stopping=early_stopping, **options)
        for width, penalty in grid
    ]
    outputs, ties = engine.generate(prompts, params), 0
    for (width, penalty), prompt, output in zip(grid, prompts, outputs, strict=True):
        theirs = transformers_beams(
            path, prompt, width, width, 8,
            length_penalty=penalty, early_stopping=early_stopping, prefix_allowed_tokens_fn=along(items, prompt),
        )  # fmt: skip
        if width == 1:  # whose score transformers computes among what is allowed
            assert [a.token_ids for a in engine_answers(output, penalty)] == [a.token_ids for a in theirs]
        else:
            ties += not agree(engine_answers(output, penalty), theirs)
        assert all((*hypothesis.token_ids[:-1],) in {*items} for hypothesis in output.outputs)
        assert {o.finish_reason for o in output.outputs} == {"stop"}
    assert ties <= MOST_TIES * len(grid) if kind != "trained" else ties == 0


def test_items_that_end_by_themselves_are_those_of_transformers(engines: Engines, model: Path) -> None:
    items, prompts = random_items(2000, [4]), [prompt_of(30 + n, n) for n in range(12)]
    params = beam_params(6, n=6, allowed_sequences=[[*item] for item in items], max_tokens=20)
    outputs = engines(model).generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        theirs = transformers_beams(
            model, prompt, 6, 6, 4, eos_token_id=None, prefix_allowed_tokens_fn=along(items, prompt, None)
        )
        assert agree(engine_answers(output, 1.0), theirs)
        assert {o.finish_reason for o in output.outputs} == {"stop"}


@torch.inference_mode()
def score_all(model: Path, prompt: list[int], sequences: Sequence[Item]) -> list[Answer]:
    """All of them, by a forward each, the most probable first."""
    answers = []
    for sequence in sequences:
        logits = load(model)(torch.tensor([[*prompt, *sequence]])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)[range(len(sequence)), list(sequence)]
        answers.append(Answer(list(sequence), logprobs.sum().item()))
    return sorted(answers, key=lambda answer: -answer.score)


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({}, lambda items: items),
        ({"catalog_stop": True}, lambda items: [(*item, EOS) for item in items]),
        ({"catalog_items": 2}, lambda items: [(*a, *b) for a, b in product(items, items)]),
    ],
    ids=["plain", "stop", "two"],
)
def test_a_search_as_wide_as_its_set_finds_all_of_it_in_order(
    engines: Engines, model: Path, options: dict[str, Any], written: Callable[[list[Item]], list[Item]]
) -> None:
    items = random_items(6, [1, 2, 3]) if "catalog_items" not in options else random_items(6, [3])
    prompt, expected = prompt_of(40), written(items)
    params = beam_params(
        40, n=len(expected), length_penalty=0.0, allowed_sequences=[[*item] for item in items],
        **{"max_tokens": 8} | options,
    )  # fmt: skip
    (output,) = engines(model).generate([prompt], params)
    assert agree(engine_answers(output, 0.0), score_all(model, prompt, expected))


def test_what_comes_before_items_is_free_as_in_transformers(engines: Engines, model: Path) -> None:
    items, num_compared = [*product(range(2, 300), repeat=2)], 0
    for number in range(6):
        prompt = prompt_of(20 + number, number)
        after = transformers_greedy(model, prompt, 1)[0]
        if after == EOS:  # which ends hypotheses before their items
            continue

        def allowed(_: int, tokens: torch.Tensor, prompt: list[int] = prompt, after: int = after) -> list[int]:
            return [
                token for token in range(300) if token > EOS or (token != EOS and after not in tokens[len(prompt) :])
            ]

        theirs = transformers_beams(model, prompt, 8, 8, 3, eos_token_id=None, prefix_allowed_tokens_fn=allowed)
        complete = [answer for answer in theirs if answer.token_ids[0] == after]
        params = beam_params(8, n=8, allowed_sequences=[[*item] for item in items], catalog_after=after, max_tokens=3)
        (output,) = engines(model).generate([prompt], params)
        output.outputs = [hypothesis for hypothesis in output.outputs if hypothesis.token_ids]
        assert agree(engine_answers(output, 1.0), complete)
        num_compared += len(complete)
    assert num_compared > 6


def test_renormalized_scores_are_those_among_what_is_allowed(engines: Engines, model: Path) -> None:
    items, prompt = random_items(5, [2]), prompt_of(25)
    params = beam_params(
        5, n=5, length_penalty=0.0, allowed_sequences=[[*i] for i in items], catalog_renormalize=True, max_tokens=2
    )
    (output,) = engines(model).generate([prompt], params)
    total = torch.tensor([hypothesis.cumulative_logprob for hypothesis in output.outputs]).exp().sum()
    assert abs(total - 1) < 1e-4  # they are all there is


def with_catalogs(engines: Engines, model: Path, folder: Path, **options: Any) -> Engine:
    config = {"check_invariants": True, "catalogs": {"items": str(folder / "items.catalog")}}
    config["catalog_folder"] = str(folder)
    return engines(model, additional_config={"trie_beam": config}, **options)


def leading_astray() -> bytes:
    """A catalog with a right checksum, whose last node has children far behind its end."""
    good = Catalog.from_sequences([[5, 6], [5, 7]])
    arrays = CatalogArrays(
        good.item_ids, np.append(good.first_child[:-1], 1 << 30).astype(np.int32), good.tokens, good.is_item
    )
    return pack_catalog(
        CatalogHeader.of(CatalogArrays(good.item_ids, good.first_child, good.tokens, good.is_item), None, None), arrays
    )


@pytest.mark.parametrize("stop", [False, True])
def test_speculation_along_a_catalog_finds_what_plain_search_finds(engines: Engines, stop: bool) -> None:
    items = random_items(400, [6, 9, 12], tokens=(200, 260))
    engine = speculating(engines, TRAINED, 3)
    options = {"allowed_sequences": [[*item] for item in items], "catalog_stop": stop, "max_tokens": 14}
    prompts = trained_prompts([24, 30, 37, 64])
    plain, drafted = (
        engine.generate(prompts, beam_params(4, n=4, speculation=speculation, **options))
        for speculation in ("off", "exact")
    )
    for ours, theirs in zip(drafted, plain, strict=True):
        assert agree(engine_answers(ours, 1.0), engine_answers(theirs, 1.0))
    assert max(map(steps_per_forward, drafted)) > 1.5  # the trie leaves little to guess


def test_a_new_version_is_taken_and_a_search_under_way_keeps_the_old_one(
    engines: Engines, model: Path, tmp_path: Path
) -> None:
    old, new = random_items(50, [4], 1), random_items(70, [4], 2)
    Catalog.from_sequences(old).save(tmp_path / "items.catalog")
    Catalog.from_sequences(new).save(tmp_path / "newer.catalog")
    engine = with_catalogs(engines, model, tmp_path)
    core, prompt = engine.llm.llm_engine, prompt_of(30)
    params = beam_params(4, n=4, catalog="items", max_tokens=6)
    core.add_request("before", {"prompt_token_ids": prompt}, params.clone())
    core.step()
    reply = load_catalog(engine.llm, "items", "newer.catalog")
    assert (reply["name"], reply["items"]) == ("items", 70)
    core.add_request("after", {"prompt_token_ids": prompt}, params.clone())
    found: dict[str, list[Item]] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            found.setdefault(output.request_id, []).extend(tuple(o.token_ids) for o in output.outputs if o.token_ids)
    assert {*found["before"]} <= {*old}
    assert {*found["after"]} <= {*new}
    engine.generate([prompt], params)  # the step in which workers forget the old one
    tries = engine.runner.catalogs.tries
    assert [*tries] == [reply["digest"]]
    (tmp_path / "astray.catalog").write_bytes(leading_astray())
    for name, file, why in (
        ("items", "astray.catalog", "astray.catalog is not a trie: not every node is a child; build it again"),
        ("other", "newer.catalog", "catalog='other' is unknown; known: items"),
        ("items", "../newer.catalog", "is not in trie_beam.catalog_folder"),
        ("items", "nothing.catalog", "cannot be read"),
    ):
        with pytest.raises(ValueError, match=why):
            load_catalog(engine.llm, name, file)
    assert {tuple(o.token_ids) for o in engine.generate([prompt], params)[0].outputs} <= {*new}


def test_a_load_that_fails_leaves_the_old_version_to_all(engines: Engines, model: Path, tmp_path: Path) -> None:
    old, new = random_items(50, [4], 1), random_items(70, [4], 2)
    Catalog.from_sequences(old).save(tmp_path / "items.catalog")
    newer = Catalog.from_sequences(new, vocab_size=300)  # as if it came with a request
    newer.save(tmp_path / "newer.catalog")
    engine, prompt = with_catalogs(engines, model, tmp_path), prompt_of(30)
    params, tries = beam_params(4, n=4, catalog="items", max_tokens=6), engine.runner.catalogs.tries
    known = [*tries]
    engine.runner.catalogs.load(str(tmp_path / "newer.catalog"))  # as if one worker had it, and others not
    core = engine.llm.llm_engine.engine_core.engine_core
    file = str(tmp_path / "newer.catalog")
    with pytest.raises(RuntimeError, match="is not the same file for all processes"):
        core.collective_rpc("load_catalog", args=("items", file, "another one"))
    broken = mock.patch.object(core.model_executor, "collective_rpc", side_effect=OSError("no such file"))
    with broken, pytest.raises(OSError, match="no such file"):
        core.collective_rpc("load_catalog", args=("items", file, newer.digest))
    inline = beam_params(4, n=4, allowed_sequences=[[*item] for item in new], max_tokens=6)
    for asked, items in ((params, old), (inline, new), (params, old)):
        assert {tuple(o.token_ids) for o in engine.generate([prompt], asked)[0].outputs} <= {*items}
    assert {*known} < {*tries}
    load_catalog(engine.llm, "items", "newer.catalog")
    assert {tuple(o.token_ids) for o in engine.generate([prompt], params)[0].outputs} <= {*new}


def test_a_set_travels_once_and_leaves_when_others_come(engines: Engines, model: Path) -> None:
    engine, prompt = engines(model), prompt_of(20)
    catalogs, sent = engine.scheduler.catalogs, []
    take = catalogs.take_changes
    catalogs.take_changes = lambda: sent.append(take()) or sent[-1]
    try:
        for _ in range(3):
            engine.generate([prompt], beam_params(3, n=3, allowed_sequences=[[5, 6], [7, 8], [9, 9]], max_tokens=4))
        assert sum(len(changes.new) for changes in sent) == 1
        for number in range(40):
            engine.generate([prompt], beam_params(2, allowed_sequences=[[5, 6 + number]], max_tokens=4))
        engine.generate([prompt], beam_params(2, max_tokens=2))
    finally:
        catalogs.take_changes = take
    assert len(engine.runner.catalogs.tries) == len(catalogs.by_digest) <= 33
    assert sum(len(changes.gone) for changes in sent) >= 8


def set_of(number: int) -> list[list[int]]:
    return [[5, 6 + number, token, token] for token in range(10, 20)]


SIZE = Catalog.from_sequences(set_of(0)).num_bytes_on_device


def test_sets_wait_for_room_in_their_order_and_others_do_not_wait(
    engines: Engines, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt = engines(model), prompt_of(20)
    scheduler, tries = engine.scheduler, engine.runner.catalogs.tries
    monkeypatch.setattr(scheduler.catalogs, "room", int(2.5 * SIZE))
    small = [[7, 8]]  # for which there is room always, but it came after others
    sets = [set_of(0), set_of(1), set_of(0), set_of(2), small, set_of(3), set_of(2)]
    along = [beam_params(2, n=2, allowed_sequences=own, max_tokens=8) for own in sets]
    plain = [beam_params(3, n=3, max_tokens=2, ignore_eos=True), SamplingParams(temperature=0, max_tokens=2)]
    entered: list[str] = []

    def look() -> None:
        entered.extend(request.request_id for request in scheduler.running if request.request_id not in entered)
        of_requests = [trie for digest, trie in tries.items() if digest in scheduler.catalogs._sets]
        held = sum(t.nbytes for trie in of_requests for t in (trie.first_child, trie.tokens, trie.is_item))
        assert held <= 2.5 * SIZE

    outputs = run(engine, [(prompt, params) for params in (*along, *plain)], look)
    for own, output in zip(sets, outputs, strict=False):
        found = [list(hypothesis.token_ids) for hypothesis in output.outputs if hypothesis.token_ids]
        assert len(found) == min(2, len(own))
        assert all(item in own for item in found)
    order = [int(request_id.split("_")[-1].split("-")[0]) for request_id in entered]
    assert [number for number in order if number < len(sets)] == [*range(len(sets))]
    assert {*order[:5]} == {0, 1, 2, len(sets), len(sets) + 1}  # in the first step: what there is room for, and others


def test_a_preempted_search_has_its_set_again(engines: Engines, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, job = engines(model), (prompt_of(20), beam_params(2, n=2, allowed_sequences=set_of(0), max_tokens=8))
    catalogs, steps = engine.scheduler.catalogs, 0
    expected = run(engine, [job])

    def lose_all_once() -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            assert engine.scheduler.running
            preempt_all(engine)
            monkeypatch.setattr(catalogs, "room", 0)
            catalogs.load({})  # as if others had needed the room
            monkeypatch.undo()
            assert not catalogs._sets

    assert count_ties(run(engine, [job], lose_all_once), expected) == 0


def test_aborted_searches_leave_no_set_behind(engines: Engines, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, core = engines(model), engines(model).llm.llm_engine
    monkeypatch.setattr(engine.scheduler.catalogs, "room", int(1.5 * SIZE))
    for number in range(4):  # of which one runs
        params = beam_params(2, n=2, allowed_sequences=set_of(number), max_tokens=8)
        core.add_request(f"set {number}", {"prompt_token_ids": prompt_of(20)}, params)
    core.step()
    core.abort_request([f"set {number}" for number in (0, 2, 1, 3)])
    engine.generate([prompt_of(20)], beam_params(2, allowed_sequences=set_of(4), max_tokens=8))
    engine.generate([prompt_of(20)], beam_params(2, max_tokens=2))
    digest = Catalog.from_sequences(set_of(4), vocab_size=300).digest
    assert [*engine.scheduler.catalogs._sets] == [digest]
    assert engine.runner.catalogs.tries.keys() == engine.scheduler.catalogs.by_digest.keys()


def test_a_set_larger_than_all_room_is_refused(engines: Engines, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, params = engines(model), beam_params(2, allowed_sequences=set_of(0), max_tokens=8)
    start_with(engine, monkeypatch, request_tables_bytes=SIZE - 1)
    with pytest.raises(
        BeamRequestError,
        match=f"^allowed_sequences may need {SIZE:,} bytes of each device, more than trie_beam.request_tables_bytes="
        f"{SIZE - 1:,}; leave some out, or raise request_tables_bytes$",
    ):
        engine.generate([prompt_of(20)], params)


def test_beams_that_cannot_live_need_no_memory(engines: Engines, model: Path) -> None:
    engine, item = engines(model, num_gpu_blocks_override=24), prompt_of(40, 3)  # with a row per beam it starves
    params = beam_params(16, n=3, allowed_sequences=[item], max_tokens=48)
    for output in engine.generate([prompt_of(9)] * 4, params):
        assert [list(o.token_ids) for o in output.outputs] == [item, [], []]
        assert [o.stop_reason for o in output.outputs] == [None, NO_HYPOTHESIS, NO_HYPOTHESIS]
    (output,) = engine.generate([prompt_of(9)], beam_params(64, n=2, allowed_sequences=[item], max_tokens=48))
    assert list(output.outputs[0].token_ids) == item


WRONG = {
    "unknown": ({"catalog": "books"}, "catalog='books' is unknown; known: items"),
    "both": (
        {"catalog": "items", "allowed_sequences": [[1]]},
        "is not supported together with catalog='items', which already names the items",
    ),
    "sampled": ({"catalog": "items", "do_sample": True}, "catalog='items' is not supported together with do_sample"),
    "semantics": ({"catalog": "items", "semantics": "vllm"}, 'together with semantics="vllm"'),
    "short": ({"catalog": "items", "max_tokens": 2}, "max_tokens=2 is too few for catalog='items'"),
    "strings": ({"allowed_sequences": ["a"]}, "allowed_sequences of strings needs a tokenizer"),
    "vocabulary": ({"allowed_sequences": [[100_000]]}, "has token 100000; tokens are 0 to 299"),
    "empty": ({"allowed_sequences": [[5], []]}, "allowed_sequences: "),
    "ambiguous": ({"allowed_sequences": [[5], [5, 6]], "catalog_items": 2}, "one item is a prefix of another"),
    "after": ({"catalog": "items", "catalog_after": 100_000}, "catalog_after=100000 is not a token id"),
    "after a stop": (
        {"catalog": "items", "catalog_after": 7, "stop_token_ids": [9, 7]},
        "catalog_after=7 is a stop token, .* leave it out of stop_token_ids",
    ),
    "after EOS": (
        {"catalog": "items", "catalog_after": EOS},
        f"catalog_after={EOS} is a stop token, .* set ignore_eos=True",
    ),
    "no stop": ({"catalog": "items", "catalog_stop": True, "ignore_eos": True}, "catalog_stop=True needs a stop token"),
    "reported": (
        {"catalog": "items", "catalog_renormalize": True, "logprobs": 1},
        "logprobs=1 is not supported together with catalog_renormalize=True",
    ),
    "alone": ({"catalog_items": 2}, "catalog_items=2 needs a catalog"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_catalog_cannot_do_is_refused_and_the_next_request_served(
    engines: Engines, model: Path, tmp_path_factory: pytest.TempPathFactory, case: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "catalogs"
    folder.mkdir(exist_ok=True)
    Catalog.from_sequences(random_items(50, [4], 1)).save(folder / "items.catalog")
    engine, (options, why) = with_catalogs(engines, model, folder), WRONG[case]
    fields = ("ignore_eos", "max_tokens", "logprobs", "stop", "stop_token_ids")
    of_vllm = {name: options[name] for name in fields if name in options}
    params = beam_params(2, **{"max_tokens": 8} | of_vllm)
    params.extra_args = {"beam_width": 2} | {name: options[name] for name in options if name not in of_vllm}
    with pytest.raises(BeamRequestError, match=why):
        engine.generate([prompt_of(9)], params)
    (output,) = engine.generate([prompt_of(9)], beam_params(2, n=2, catalog="items", max_tokens=8))
    assert all(len(o.token_ids) == 4 for o in output.outputs)


def test_an_engine_refuses_a_catalog_that_is_none_or_for_another_vocabulary(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.catalog").write_text("not a catalog")
    Catalog.from_sequences([(5, 100_000)]).save(tmp_path / "other.catalog")
    (tmp_path / "astray.catalog").write_bytes(leading_astray())
    astray = "astray.catalog is not a trie: not every node is a child; build it again"
    reasons = {"text": "text.catalog", "other": "another vocabulary", "missing": "cannot be read", "astray": astray}
    for name, why in reasons.items():
        config = {"catalogs": {"items": str(tmp_path / f"{name}.catalog")}}
        with pytest.raises(ValueError, match=why):
            Engine(model, additional_config={"trie_beam": config})


def test_a_compact_answer_names_the_items(engines: Engines, model: Path) -> None:
    prompt = prompt_of(30)
    after = transformers_greedy(model, prompt, 1)[0]
    some, all_pairs = (
        [[*item] for item in random_items(200, [3])],
        [[*pair] for pair in product(range(2, 300), repeat=2)],
    )
    asked: list[tuple[dict[str, Any], list[list[int]], Callable[[list[int]], list[list[int]]]]] = [
        ({}, some, lambda tokens: [tokens]),
        ({"catalog_stop": True}, some, lambda tokens: [tokens[:3]]),
        ({"catalog_items": 2}, some, lambda tokens: [tokens[:3], tokens[3:]]),
        ({"catalog_after": after, "max_tokens": 3}, all_pairs, lambda tokens: [tokens[tokens.index(after) + 1 :]]),
    ]
    for options, sequences, items_of in asked:
        params = beam_params(9, compact=True, allowed_sequences=sequences, **{"max_tokens": 8} | options)
        (output,) = engines(model).generate([prompt], params)
        found = hypotheses(output)
        assert len(found) > 0
        for tokens, length, ids in zip(found.token_ids, found.lengths, found.item_ids, strict=True):
            assert [sequences[own_id] for own_id in np.atleast_1d(ids)] == items_of(tokens[:length].tolist())
        plain = beam_params(9, n=9, allowed_sequences=sequences, **{"max_tokens": 8} | options)
        (output,) = engines(model).generate([prompt], plain)
        assert output.kv_transfer_params["trie_beam"]["item_ids"] == found.item_ids.tolist()


@pytest.mark.parametrize(
    ("min_tokens", "max_tokens", "stop", "lengths"),
    [(3, 6, False, [3, 3, 4]), (4, 6, False, [4]), (3, 3, False, [3, 3]), (3, 3, True, [3, 3]), (4, 6, True, [4])],
)
def test_an_item_of_as_many_tokens_as_are_demanded_is_found(
    engines: Engines, model: Path, min_tokens: int, max_tokens: int, stop: bool, lengths: list[int]
) -> None:
    items = [[3, 4, 5], [6, 7, 8], [9, 10, 11, 12]]
    options = {"catalog_stop": stop, "min_tokens": min_tokens, "max_tokens": max_tokens, "allowed_sequences": items}
    (output,) = engines(model).generate([prompt_of(9)], beam_params(3, n=3, **options))
    found = [[*one.token_ids] for one in output.outputs]
    assert [len(item) for item in items if item in [tokens[: len(item)] for tokens in found]] == lengths


def test_an_item_that_ends_with_a_stop_token_is_told_where_no_stop_follows(engines: Engines) -> None:
    sequences = [[370, 78, 503], [370, 78, 87]]
    options = {"catalog_stop": True, "stop_token_ids": [503], "allowed_sequences": sequences}
    (output,) = engines(TRAINED_TARGET).generate(
        [trained_prompts([31])[0]], beam_params(2, n=2, max_tokens=3, **options)
    )
    found = [sequences[own_id] for own_id in output.kv_transfer_params["trie_beam"]["item_ids"]]
    assert found == [list(hypothesis.token_ids) for hypothesis in output.outputs]
    assert sorted(found) == sorted(sequences)
