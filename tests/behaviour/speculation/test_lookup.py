"""Searches that draft by n-grams find what plain steps find, in fewer forwards where a text repeats itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams

from tests.support.disturb import Clumsy
from tests.support.engine import BLOCK_SIZE, Engine, Engines
from tests.support.items import random_items
from tests.support.options import DRAFTED
from tests.support.pairs import (
    ORDINARY,
    Asked,
    check_exact,
    count_differing,
    grid,
    looking_up,
    searches,
    steps_per_forward,
)
from tests.support.running import answers, prompt_of, run, start_with, trained_prompts
from tests.support.sweep import sweep
from vllm_trie import beam_params
from vllm_trie.speculation.worker.draft import Drafter
from vllm_trie.speculation.worker.draft_by_lookup import LookupDrafter

pytestmark = pytest.mark.slow

WIDTHS = [1, 2, 4, 8]


def copies(count: int, length: int = 48) -> list[list[int]]:
    """Prompts that say the same twice, the second time up to the middle."""
    prompts = trained_prompts([length] * count)
    return [[*prompt, *prompt[1:], *prompt[1 : length // 2]] for prompt in prompts]


@pytest.mark.nightly
@pytest.mark.parametrize(("num_layers", "ngrams"), [(1, (1, 4)), (3, (1, 1)), (3, (3, 5)), (5, (1, 4))])
def test_a_model_that_copies_finds_what_plain_steps_find(
    engines: Engines, copying_model: Path, num_layers: int, ngrams: tuple[int, int]
) -> None:
    engine = engines(copying_model, **looking_up(num_layers, *ngrams), max_num_seqs=128)
    prompts = [[*prompt_of(BLOCK_SIZE, seed), *prompt_of(BLOCK_SIZE, seed)] for seed in range(40)]
    outputs = check_exact(engine, grid(prompts, max_tokens=BLOCK_SIZE + 6), ordinary=ORDINARY)
    assert max(map(steps_per_forward, outputs)) > 1 + num_layers / 2


@pytest.mark.nightly
def test_what_is_copied_takes_fewer_forwards(engines: Engines, copying_model: Path) -> None:
    engine = engines(copying_model, **looking_up(4), max_num_seqs=128)
    asked = [(p, {"beam_width": w, "max_tokens": 2 * BLOCK_SIZE}) for w in WIDTHS for p in copies(3)]
    outputs = check_exact(engine, asked)
    of_widths = [outputs[at : at + 3] for at in range(0, len(outputs), 3)]
    least = [min(map(steps_per_forward, of_width)) for of_width in of_widths]
    assert least[0] > 4
    assert min(least) > 2


@pytest.mark.nightly
def test_whatever_acts_on_a_search_acts_on_each_step_of_it(engines: Engines, copying_model: Path) -> None:
    engine = engines(copying_model, **looking_up(4), max_num_seqs=128)
    widths = {"beam_width": 4, "draft_width": 12, "max_tokens": 24}
    prompts = copies(len(DRAFTED), BLOCK_SIZE - 9)
    asked = [(p, widths | options) for p, options in zip(prompts, DRAFTED, strict=True)]
    outputs = check_exact(engine, asked, ordinary=ORDINARY)
    assert sum(steps_per_forward(output) > 1.2 for output in outputs) > len(outputs) // 5


@pytest.mark.parametrize("kind", sweep(["gqa", "gemma2"], "gqa"))
def test_a_model_that_makes_everything_up_finds_what_plain_steps_find(
    engines: Engines, random_model: Callable[[str], Path], kind: str
) -> None:
    engine = engines(random_model(kind), **looking_up(3), max_num_seqs=128)
    prompts = [[*prompt_of(BLOCK_SIZE, seed), *prompt_of(BLOCK_SIZE, seed)] for seed in range(40)]
    check_exact(engine, grid(prompts, max_tokens=BLOCK_SIZE + 6)[:20], ordinary=ORDINARY)


@pytest.fixture
def engine(engines: Engines, copying_model: Path) -> Engine:
    return engines(copying_model, **looking_up(3), max_num_seqs=64)


def test_drafts_lead_along_the_catalog(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [[*item] for item in random_items(60, [3, 4, 6])]
    beginnings = {tuple(item[:length]) for item in items for length in range(len(item) + 1)}
    prompt = [token for item in items[::3] for token in item]
    drafted = 0
    forests = LookupDrafter.forests

    def along(drafter: LookupDrafter, context: Any, groups: Any) -> Any:
        nonlocal drafted
        found = forests(drafter, context, groups)
        tokens = engine.runner.req_states.all_token_ids.gpu
        for one in found.values():
            for path in map(one.forest.path, one.forest.leaves()):
                slot = one.group.slots[path[0]]
                history = tokens[slot, len(prompt) : one.start].tolist() + [one.forest.tokens[node] for node in path]
                assert len(path) == 1 or _items_begun(history, beginnings, items)
                drafted += len(path) - 1
        return found

    monkeypatch.setattr(LookupDrafter, "forests", along)
    options = {"allowed_sequences": items, "catalog_items": 4, "catalog_stop": True, "max_tokens": 30}
    check_exact(engine, [(prompt, {"beam_width": width, **options}) for width in WIDTHS])
    assert drafted > 20


def _items_begun(tokens: list[int], beginnings: set[tuple[int, ...]], items: list[list[int]]) -> bool:
    """Whether these tokens are items, one after the other, and the beginning of one."""
    if tuple(tokens) in beginnings:
        return True
    return any(tokens[: len(i)] == i and _items_begun(tokens[len(i) :], beginnings, items) for i in items)


def test_where_nothing_repeats_itself_steps_are_plain(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_forest(*_: Any) -> Any:
        raise AssertionError("nothing was found, and a forest was made")

    monkeypatch.setattr(Drafter, "_make_forest", no_forest)
    monkeypatch.setattr(LookupDrafter, "_look_up", _nothing_of(LookupDrafter._look_up))
    (output,) = check_exact(engine, [(prompt_of(20), {"beam_width": 4, "max_tokens": 9})])
    counts = output.kv_transfer_params["trie_beam"]
    assert (counts["drafted"], counts["steps_per_forward"]) == (0, 1.0)


def _nothing_of(look_up: Callable[..., Any]) -> Callable[..., Any]:
    def found(*args: Any) -> Any:
        every = look_up(*args)
        return every._replace(beams=every.beams[:0], tokens=every.tokens[:0])

    return found


@pytest.mark.nightly
def test_a_search_that_is_preempted_again_and_again_finds_the_same(engine: Engine) -> None:
    prompts = [[*prompt_of(20, seed), *prompt_of(20, seed)] for seed in range(3)]
    asked: list[Asked] = [(p, {"beam_width": w, "max_tokens": 40}) for w, p in zip((1, 4, 6), prompts, strict=True)]
    clumsy = Clumsy(engine)
    outputs = check_exact(engine, asked, clumsy.preempt_whenever_a_search_is_further)
    assert clumsy.num_preempted > 10
    assert max(map(steps_per_forward, outputs)) > 1.2


def test_ordinary_requests_keep_the_drafts_of_vllm(engine: Engine) -> None:
    """In a batch with searches that speculate, and where the method is one with which vLLM schedules ahead."""
    repeating = [*prompt_of(12)] * 3
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    num_steps = 0

    def count() -> None:
        nonlocal num_steps
        num_steps += 1

    alone = run(engine, [(repeating, greedy)], count)
    assert num_steps < 50, "vLLM's n-grams are of no use"
    search = beam_params(3, max_tokens=20, ignore_eos=True)
    steps_alone, num_steps = num_steps, 0
    together = run(engine, [(repeating, greedy), (repeating, search)], count)
    assert num_steps <= steps_alone + 2
    assert answers(together[:1]) == answers(alone)


def test_beams_that_are_sampled_do_not_speculate(engine: Engine) -> None:
    params = beam_params(3, do_sample=True, temperature=0.7, seed=1, max_tokens=9)
    (output,) = run(engine, [(prompt_of(9), params)])
    assert output.kv_transfer_params is None
    with pytest.raises(ValueError, match='speculation="sample" needs a draft model, by whose distribution drafts are'):
        engine.generate([prompt_of(9)], beam_params(3, speculation="sample", max_tokens=9))


def test_n_grams_are_no_model_to_contrast(engine: Engine) -> None:
    with pytest.raises(
        ValueError, match=r"contrast=\{\} needs a draft model, and this engine drafts by method='ngram'; start it"
    ):
        engine.generate([prompt_of(9)], beam_params(3, contrast={}, max_tokens=9))


def test_beam_search_of_the_llm_speculates(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in copies(3)]
    found = []
    for speculation in ("off", "exact"):
        start_with(engine, monkeypatch, speculation=speculation)
        outputs = engine.llm.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=30))
        found.append([[(s.tokens, s.text, round(s.cum_logprob, 3)) for s in o.sequences] for o in outputs])
    assert found[0] == found[1]


def test_searches_of_both_kinds_share_a_batch(engine: Engine) -> None:
    asked: list[Asked] = [([*prompt_of(15)] * 2, {"beam_width": width, "max_tokens": 30}) for width in WIDTHS]
    jobs = [*searches(asked), *searches(asked, "off")]
    outputs = run(engine, jobs)
    assert count_differing(outputs[: len(asked)], outputs[len(asked) :]) == 0


def test_a_method_that_schedules_ahead_finds_the_same(engines: Engines, copying_model: Path) -> None:
    engine = engines(copying_model, **looking_up(3, method="ngram_gpu"), max_num_seqs=64)
    prompts = [[*prompt_of(BLOCK_SIZE, seed), *prompt_of(BLOCK_SIZE, seed)] for seed in range(12)]
    outputs = check_exact(engine, grid(prompts, max_tokens=BLOCK_SIZE + 6), ordinary=ORDINARY)
    assert max(map(steps_per_forward, outputs)) > 1.5
