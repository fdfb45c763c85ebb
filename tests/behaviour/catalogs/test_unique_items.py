"""Where each item counts once, an engine finds what a plain loop over the model finds, however it is disturbed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.sampling_params import RequestOutputKind

from tests.behaviour.catalogs.test_catalogs import with_catalogs
from tests.support.disturb import Clumsy
from tests.support.engine import Engine, Engines
from tests.support.items import EOS, Item, random_items
from tests.support.pairs import TRAINED, drafting, steps_per_forward
from tests.support.reference import SCORE_TOLERANCE, load
from tests.support.running import answers, count_ties, prompt_of, run, trained_prompts
from tests.support.sweep import sweep
from tests.support.unique_items import Along, Found, LogprobsOf, agree, all_items, compared, loop_unique_items
from vllm_trie import beam_params, hypotheses, load_catalog
from vllm_trie.catalog import Catalog
from vllm_trie.entrypoints.requests.refusals import BeamRequestError
from vllm_trie.messages import NO_HYPOTHESIS

pytestmark = pytest.mark.slow
MAX_TOKENS = 6
TITLES = {item: 7 * (number % 9) for number, item in enumerate(random_items(60, [1, 2, 3, 4], tokens=(2, 60)))}
CODES = {item: number % 6 for number, item in enumerate(random_items(24, [2], 1))}  # all of one length
PROMPT = prompt_of(30, 4)


@pytest.fixture(scope="module")
def model(random_model: Callable[[str], Path]) -> Path:
    return random_model("gqa")


def catalog_of(names: dict[Item, int]) -> Catalog:
    return Catalog.from_sequences([*names], [*names.values()])


@pytest.fixture
def engine(engines: Engines, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.getbasetemp() / "titles"
    if not folder.exists():
        folder.mkdir()
        catalog_of(TITLES).save(folder / "items.catalog")
    return with_catalogs(engines, model, folder)


def logprobs_after(model: Path, prompt: list[int], biases: Mapping[int, float] | None = None) -> LogprobsOf:
    """With `biases`, these tokens alone may come."""

    @cache
    @torch.inference_mode()
    def logprobs_of(tokens: Item) -> Sequence[float]:
        logits = load(model)(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
        if biases is not None:
            added = torch.full_like(logits, -math.inf)
            added[[*biases]] = torch.tensor([*biases.values()])
            logits = logits + added
        return logits.log_softmax(-1).tolist()

    return logprobs_of


def unique_params(width: int, **options: Any) -> Any:
    return beam_params(
        width, **{"n": width, "catalog": "items", "catalog_unique": True, "max_tokens": MAX_TOKENS} | options
    )


def check(output: Any, expected: list[Found], length_penalty: float = 1.0) -> None:
    """Raise AssertionError unless these hypotheses came back, and nothing else."""
    found = [each for each in output.outputs if each.token_ids]
    ours = [(compared(o.cumulative_logprob, len(o.token_ids), length_penalty), tuple(o.token_ids)) for o in found]
    agree(ours, expected, SCORE_TOLERANCE)
    ids = output.kv_transfer_params["trie_beam"]["item_ids"]
    assert [tuple(each) if isinstance(each, list) else (each,) for each in ids] == [each.ids for each in expected]
    rest = output.outputs[len(found) :]
    assert {each.stop_reason for each in rest} <= {NO_HYPOTHESIS}


SEARCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sums": {"length_penalty": 0.0, "early_stopping": "never"},
    "early": {"early_stopping": True},
    "stop": {"catalog_stop": True},
    "stops": {"catalog_stop": True, "stop_token_ids": [250, 251]},
    "widths": {"beam_widths": [2, 5, 3]},
}


@pytest.mark.parametrize("width", [1, 5, 20])
@pytest.mark.parametrize("case", sweep(SEARCHES, "plain", "stops"))
def test_a_search_finds_what_a_plain_loop_finds(engine: Engine, model: Path, case: dict[str, Any], width: int) -> None:
    widths = case.get("beam_widths", [width])
    (output,) = engine.generate([PROMPT], unique_params(max(widths), **case))
    stops = (EOS, *case.get("stop_token_ids", ())) if "catalog_stop" in case else ()
    how = {name: case[name] for name in ("length_penalty", "early_stopping") if name in case}
    expected = loop_unique_items(Along(TITLES, stops=stops), logprobs_after(model, PROMPT), widths, MAX_TOKENS, **how)
    check(output, expected, case.get("length_penalty", 1.0))


@pytest.mark.parametrize("ends_with_stop", [False, True])
def test_a_search_as_wide_as_its_catalog_finds_all_items(engine: Engine, model: Path, ends_with_stop: bool) -> None:
    params = unique_params(62, length_penalty=0.0, catalog_stop=ends_with_stop)
    (output,) = engine.generate([PROMPT], params)
    along = Along(TITLES, stops=(EOS,) if ends_with_stop else ())
    expected = all_items(along, logprobs_after(model, PROMPT), 62, 0.0)
    assert len(expected) == 9
    check(output, expected, 0.0)
    assert [each.stop_reason for each in output.outputs[9:]] == [NO_HYPOTHESIS] * 53


@pytest.mark.parametrize("num_items", [1, 2])
def test_items_of_one_length_fill_the_answer(engines: Engines, model: Path, tmp_path: Path, num_items: int) -> None:
    catalog_of(CODES).save(tmp_path / "items.catalog")
    engine, along = with_catalogs(engines, model, tmp_path), Along(CODES, num_items)
    (output,) = engine.generate([PROMPT], unique_params(4, catalog_items=num_items))
    expected = loop_unique_items(along, logprobs_after(model, PROMPT), [4], MAX_TOKENS)
    check(output, expected)
    assert num_items > 1 or len(expected) == 4


@pytest.mark.parametrize("ends_with_stop", [False, True])
def test_an_item_after_several_texts_comes_back_with_the_best_of_them(
    engine: Engine, model: Path, ends_with_stop: bool
) -> None:
    names, after, stops = {(token,): token - 2 for token in range(2, 10)}, 10, (EOS,) if ends_with_stop else ()
    biases = dict.fromkeys((*range(2, 14), *stops), 0.0) | {after: 4.0}  # texts that end as one item are likely
    asked = {"catalog": None, "allowed_sequences": [[*item] for item in names], "catalog_after": after}
    asked |= {
        "catalog_stop": ends_with_stop,
        "allowed_token_ids": [*biases],
        "logit_bias": {after: 4.0},
        "max_tokens": 5,
    }
    plain, unique = engine.generate(
        [PROMPT] * 2, [unique_params(8, **asked, catalog_unique=is_unique) for is_unique in (False, True)]
    )
    along = Along(names, after=after, stops=stops, barred=(EOS,))
    check(unique, loop_unique_items(along, logprobs_after(model, PROMPT, biases), [8], 5))
    ids = plain.kv_transfer_params["trie_beam"]["item_ids"]
    assert len(ids) > len({*ids})


def test_other_searches_of_the_batch_find_what_they_find_alone(engine: Engine) -> None:
    jobs = [(prompt_of(20 + number, number), number) for number in range(6)]
    both = {
        is_unique: [(prompt, unique_params(4, n=4, catalog_unique=is_unique)) for prompt, _ in jobs]
        for is_unique in (False, True)
    }
    alone = {is_unique: run(engine, own) for is_unique, own in both.items()}
    together = run(engine, [*both[False], *both[True]])
    assert count_ties(together, [*alone[False], *alone[True]]) == 0
    assert answers(alone[False]) != answers(alone[True])


def test_preempted_searches_find_the_same(engine: Engine) -> None:
    jobs = [(prompt_of(20 + number, number), unique_params(5, catalog_stop=number % 2 == 1)) for number in range(4)]
    expected, clumsy = run(engine, jobs), Clumsy(engine)
    assert count_ties(run(engine, jobs, clumsy.preempt_whenever_a_search_is_further), expected) == 0
    assert clumsy.num_preempted > 1


def test_a_stream_and_a_compact_answer_have_the_same_hypotheses(engine: Engine) -> None:
    (whole,) = engine.generate([PROMPT], unique_params(5))
    (compact,) = engine.generate([PROMPT], unique_params(5, n=1, compact=True))
    found = hypotheses(compact)
    expected = [list(each.token_ids) for each in whole.outputs]
    assert [t[:n].tolist() for t, n in zip(found.token_ids, found.lengths, strict=True)] == expected
    assert found.item_ids.tolist() == whole.kv_transfer_params["trie_beam"]["item_ids"]
    core, params, tokens = engine.llm.llm_engine, unique_params(5, n=1), list[int]()
    params.output_kind = RequestOutputKind.DELTA
    core.add_request("stream", {"prompt_token_ids": PROMPT}, params)
    while core.has_unfinished_requests():
        for output in core.step():
            tokens += output.outputs[0].token_ids
    assert tokens == expected[0]


def test_groups_of_beams_return_no_item_twice(engine: Engine) -> None:
    groups = {"num_beam_groups": 3, "diversity_penalty": 0.2}
    prompts = [prompt_of(20 + number, number) for number in range(8)]
    plain, unique = (
        [
            output.kv_transfer_params["trie_beam"]["item_ids"]
            for output in engine.generate(prompts, unique_params(9, **groups, catalog_unique=is_unique))
        ]
        for is_unique in (False, True)
    )
    assert all(len(ids) == len({*ids}) >= 3 for ids in unique)
    assert any(len(ids) > len({*ids}) for ids in plain)


def test_a_search_under_way_keeps_the_ids_of_its_own_version(engines: Engines, model: Path, tmp_path: Path) -> None:
    catalog_of(CODES).save(tmp_path / "items.catalog")
    catalog_of(dict.fromkeys(CODES, 3)).save(tmp_path / "newer.catalog")
    engine = with_catalogs(engines, model, tmp_path)
    core, found = engine.llm.llm_engine, dict[str, list[int]]()
    core.add_request("before", {"prompt_token_ids": PROMPT}, unique_params(4))
    core.step()
    load_catalog(engine.llm, "items", "newer.catalog")
    core.add_request("after", {"prompt_token_ids": PROMPT}, unique_params(4))
    while core.has_unfinished_requests():
        for output in core.step():
            found[output.request_id] = output.kv_transfer_params["trie_beam"]["item_ids"]
    assert len({*found["before"]}) == len(found["before"]) == 4
    assert found["after"] == [3]


@pytest.mark.parametrize("ends_with_stop", [False, True])
def test_speculation_finds_what_plain_search_finds(engines: Engines, tmp_path: Path, ends_with_stop: bool) -> None:
    items = random_items(300, [4, 6, 8], tokens=(200, 260))
    items = sorted({*items, *(item[:3] for item in items[::5])})  # some begin others
    catalog_of({item: number % 70 for number, item in enumerate(items)}).save(tmp_path / "items.catalog")
    engine = with_catalogs(engines, TRAINED[0], tmp_path, **drafting(TRAINED[1], 3))
    prompts, options = trained_prompts([24, 30, 37, 64]), {"catalog_stop": ends_with_stop, "max_tokens": 10}
    plain, drafted = (
        engine.generate(prompts, unique_params(4, speculation=speculation, **options))
        for speculation in ("off", "exact")
    )
    assert count_ties(drafted, plain) == 0
    assert max(map(steps_per_forward, drafted)) > 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "catalog_unique=True needs a catalog or allowed_sequences; add one, or leave it out"),
        (
            {"catalog": "items", "do_sample": True},
            "catalog='items' is not supported together with do_sample=True",
        ),
        ({"catalog": "items", "catalog_unique": "yes"}, "catalog_unique='yes' is neither true nor false"),
        (
            {"catalog": "items"},
            "catalog_unique=True with 64 beams would look for different items of catalog='items' among more than "
            "16,384 continuations in a step; search with at most 55 beams",
        ),
    ],
    ids=["alone", "sampled", "no boolean", "too wide"],
)
def test_what_is_refused_names_the_option_and_the_next_request_is_served(
    engines: Engines, model: Path, tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any], why: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "crowded"
    if not folder.exists():
        folder.mkdir()
        catalog_of({(2 + n % 128, 2 + n // 128): n // 300 for n in range(18_000)}).save(folder / "items.catalog")
    engine, params = with_catalogs(engines, model, folder), beam_params(64, max_tokens=4)
    params.extra_args = {"beam_width": 64, "catalog_unique": True} | options
    with pytest.raises(BeamRequestError, match=why):
        engine.generate([PROMPT], params)
    (output,) = engine.generate([PROMPT], unique_params(55))
    ids = output.kv_transfer_params["trie_beam"]["item_ids"]
    assert len(ids) == len({*ids}) == 55
