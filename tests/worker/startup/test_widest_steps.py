"""No step of the search holds more memory than vLLM has seen while it measured what is left for the KV cache."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from benchmarks.memory_counter import MemoryCounter
from benchmarks.weightless import CATALOG, NOWHERE, WeightlessStep, kernels_noted, nowhere
from tests.support.sweep import sweep
from tests.support.taken_again import TakenAgain
from tests.worker.select.test_waits import RULES
from vllm_trie.options import PLUGIN_NAME
from vllm_trie.options.parts import MOST_PHRASE_TOKENS
from vllm_trie.search import parts
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import ItemConstraint
from vllm_trie.search.constraints.constraint import ConstraintSource
from vllm_trie.search.constraints.contrast import ContrastConstraint
from vllm_trie.search.constraints.grammar import GrammarConstraint
from vllm_trie.search.constraints.ngrams import NGramConstraint
from vllm_trie.search.constraints.phrase_boosts import PhraseBoostConstraint
from vllm_trie.search.constraints.stops import StopConstraints, StopStringConstraint
from vllm_trie.search.filters import SearchFilters, SearchPruning
from vllm_trie.search.rank import SearchCandidates
from vllm_trie.search.rules import SearchInputs, SearchRules
from vllm_trie.search.step import is_light_search_step, take_packed_search_step, take_search_step
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.search.strategies.in_groups import DiverseGroupsStrategy
from vllm_trie.search.strategies.joint_sampling import JointSamplingStrategy
from vllm_trie.search.strategies.sampled import RowSamplingStrategy
from vllm_trie.search.strategies.stochastic import StochasticStrategy
from vllm_trie.speculation.worker.draft_memory import take_widest_draft_move
from vllm_trie.worker.kv.kv_caches import ByToken, KVCaches
from vllm_trie.worker.rows.catalogs import RowCatalogs
from vllm_trie.worker.runner import BeamModelRunner
from vllm_trie.worker.select import selection_graphs
from vllm_trie.worker.select.selection_graphs import SelectionGraphs
from vllm_trie.worker.speculation import RunnerSpeculation
from vllm_trie.worker.startup import widest_steps
from vllm_trie.worker.startup.widest_steps import (
    ROWS,
    most_bytes_at_startup,
    most_heavy_rows_measured,
    take_widest_startup_steps,
)

WIDTH, VOCAB_SIZE, MOST_LOGPROBS = 15, 20_000, 20
CELLS = WIDTH * VOCAB_SIZE
STOCK_CELLS = parts.CELLS  # more
SMALL = 15_000  # bytes, of what does not grow with the vocabulary
MOST_CHILDREN = (VOCAB_SIZE,) * 9  # by depth, of a catalog
NUCLEUS = SearchFilters(0.7, top_p=0.9)
PLAIN = RULES["plain"]
ALL_REPORTED = PLAIN._replace(num_logprobs=MOST_LOGPROBS, is_controlled=True)
SEARCHES = RULES | {
    "jointly sampled from a nucleus": PLAIN._replace(
        strategy=JointSamplingStrategy(False, 1, None, False), filters=NUCLEUS
    ),
    "jointly sampled with replacement": PLAIN._replace(
        strategy=JointSamplingStrategy(True, 1, None, False), filters=NUCLEUS
    ),
    "stochastic": PLAIN._replace(strategy=StochasticStrategy(), filters=NUCLEUS),
    "sampled from a nucleus": PLAIN._replace(strategy=RowSamplingStrategy(), filters=NUCLEUS, is_controlled=True),
    "log-probabilities": PLAIN._replace(num_logprobs=MOST_LOGPROBS, is_controlled=True),
    "contrast": RULES["contrast"]._replace(filters=NUCLEUS, is_controlled=True, num_logprobs=MOST_LOGPROBS),
    "many stop tokens": PLAIN._replace(
        stops=StopConstraints(tuple(range(9))), num_logprobs=MOST_LOGPROBS, is_controlled=True
    ),
    "all tokens up to one, then a catalog": PLAIN._replace(constraints=(ItemConstraint(CATALOG, after=7),)),
    "several items": PLAIN._replace(constraints=(ItemConstraint(CATALOG, num_items=2),)),
    "items with log-probabilities": PLAIN._replace(constraints=(ItemConstraint(CATALOG),), num_logprobs=MOST_LOGPROBS),
    "items, renormalized": PLAIN._replace(constraints=(ItemConstraint(CATALOG, renormalizes=True),)),
    "a grammar": ALL_REPORTED._replace(constraints=(GrammarConstraint(), NGramConstraint(2))),
    "a grammar of what LLM.beam_search sees": ALL_REPORTED._replace(
        constraints=(GrammarConstraint(5),), strategy=BestStrategy("vllm")
    ),
    "a grammar and a contrast": ALL_REPORTED._replace(
        constraints=(GrammarConstraint(), ContrastConstraint(0.1, 0.5)),
        filters=NUCLEUS,
        pruning=SearchPruning(0.1, 1.0, 0.1, 2),
    ),
    "several items after a token": ALL_REPORTED._replace(
        constraints=(ItemConstraint(CATALOG, 3, 7, ends_with_stop=True), PhraseBoostConstraint.of([([5, 6], 1.0)]))
    ),
    "a grammar, jointly sampled": ALL_REPORTED._replace(
        constraints=(GrammarConstraint(),), strategy=JointSamplingStrategy(False, 1, None, False)
    ),
    "a contrast that only narrows": ALL_REPORTED._replace(constraints=(ContrastConstraint(0.1, 0.0),)),
    "phrases that only lose": ALL_REPORTED._replace(constraints=(PhraseBoostConstraint.of([([5], -1.0)]),)),
    "phrases and many stop tokens of LLM.beam_search": ALL_REPORTED._replace(
        strategy=BestStrategy("vllm"),
        stops=StopConstraints(tuple(range(40))),
        constraints=(PhraseBoostConstraint.of([([5], 1.0)]),),
    ),
    **{
        f"almost all tokens stop, {semantics}": ALL_REPORTED._replace(
            strategy=BestStrategy(semantics),
            stops=StopConstraints(tuple(range(VOCAB_SIZE - 1))),
            constraints=(NGramConstraint(2),),
        )
        for semantics in ("hf", "vllm", "tridecode")
    },
    "almost all tokens stop, in groups": ALL_REPORTED._replace(
        strategy=DiverseGroupsStrategy(3, 0.5, 0), stops=StopConstraints(tuple(range(VOCAB_SIZE - 1))), filters=NUCLEUS
    ),
    "before a catalog": PLAIN._replace(constraints=(ItemConstraint(CATALOG, after=7),), filters=NUCLEUS),
}


@pytest.fixture(params=[1, 5])
def num_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """In how many parts rows are taken where that needs much memory."""
    num_parts: int = request.param
    monkeypatch.setattr(parts, "CELLS", CELLS // num_parts)
    return num_parts


@cache
def profiled(num_rows: int = WIDTH, num_parts: int = 1) -> int:
    """Bytes that vLLM sees of batches of so many rows, where `WIDTH` of them are so many parts."""
    assert parts.CELLS in (CELLS // num_parts, STOCK_CELLS)
    logits = nowhere(num_rows, VOCAB_SIZE, dtype=torch.bfloat16)
    with kernels_noted(), torch.inference_mode(), MemoryCounter() as counter:
        take_widest_startup_steps(logits, WIDTH, MOST_LOGPROBS)
    return counter.most


def with_masks(step: WeightlessStep) -> WeightlessStep:
    """Of each group, if it has a grammar."""
    for name, group in step.groups.items():
        if any(key.source is ConstraintSource.MASKS for key in group.rules.constraints):
            step.context.masks[name] = nowhere(group.rules.width, VOCAB_SIZE // 32, dtype=torch.int32)
    return step


@pytest.mark.parametrize("rules", SEARCHES.values(), ids=SEARCHES)
def test_no_search_holds_more_than_was_profiled(rules: SearchRules, num_parts: int) -> None:
    with kernels_noted(), torch.inference_mode():
        step = with_masks(WeightlessStep(rules._replace(width=WIDTH), 1, VOCAB_SIZE, most_children=MOST_CHILDREN))
        with MemoryCounter() as counter:
            step.sample(np.array([25]))
    assert 0 < counter.most <= profiled(WIDTH, num_parts) + SMALL


class SaysNothing(StopStringConstraint):
    """Stop strings, of which nobody looks for any."""

    num_going_on = CELLS

    def __init__(self) -> None:
        pass

    def end(self, candidates: SearchCandidates[torch.Tensor], is_stop: np.ndarray) -> torch.Tensor:
        return torch.empty_like(candidates.tokens, dtype=torch.bool)


@pytest.mark.parametrize("semantics", ["hf", "vllm", "tridecode"])
def test_stop_strings_and_as_many_phrases_as_there_may_be_hold_no_more(semantics: str, num_parts: int) -> None:
    phrases = PhraseBoostConstraint.of([(range(first, first + 10), 1.0) for first in range(0, MOST_PHRASE_TOKENS, 10)])
    rules = ALL_REPORTED._replace(
        width=WIDTH, strategy=BestStrategy(semantics), stops=StopConstraints((7,), ("end",)), constraints=(phrases,)
    )
    beams = SearchBeams(nowhere(1, WIDTH, dtype=torch.float32), states={phrases: phrases.begin(WIDTH, NOWHERE)})
    take_search_step(
        rules, nowhere(1, WIDTH, VOCAB_SIZE), beams, SearchInputs(completes=SaysNothing())
    )  # which uploads tables
    with torch.inference_mode(), MemoryCounter() as counter:
        logits = nowhere(1, WIDTH, VOCAB_SIZE, dtype=torch.bfloat16).float()
        take_packed_search_step(rules, logits, beams, SearchInputs(completes=SaysNothing()))
    assert 0 < counter.most <= profiled(WIDTH, num_parts) + SMALL


@pytest.mark.parametrize("constraints", [(), (ItemConstraint(CATALOG),)], ids=["plain", "along a catalog"])
def test_steps_of_many_beams_by_kernels_hold_little(constraints: tuple[ItemConstraint, ...]) -> None:
    width, rules = 500, PLAIN._replace(width=500, constraints=constraints)
    with kernels_noted() as noted, torch.inference_mode():
        step = WeightlessStep(rules, 1, VOCAB_SIZE, most_children=(8192,) * 3)
        with MemoryCounter() as counter:
            step.sample(np.array([25]))
    assert noted["_rank_item_tiles_kernel" if constraints else "_rank_blocks_kernel"].count == 1
    assert 0 < counter.most <= 0.2 * 2 * width * VOCAB_SIZE  # of the bytes of logits


@pytest.mark.parametrize(
    "search", ["sampled from a nucleus", "stochastic", "jointly sampled from a nucleus", "before a catalog"]
)
def test_searches_that_need_much_memory_share_it(search: str) -> None:
    """No more of them are selected together than vLLM has seen."""
    width, most = 16, dict[int, int]()
    for num_groups in (ROWS // width, 3 * ROWS // width):
        with kernels_noted(), torch.inference_mode():
            step = WeightlessStep(SEARCHES[search]._replace(width=width), num_groups, VOCAB_SIZE)
            with MemoryCounter() as counter:
                step.select(np.full(num_groups, 25))
        most[num_groups] = counter.most
    fewer, more = most.values()
    assert CELLS < more < 1.1 * fewer


@pytest.mark.parametrize(
    "search", [name for name, rules in SEARCHES.items() if is_light_search_step(rules._replace(width=WIDTH))]
)
def test_no_large_batch_holds_more_than_was_profiled(search: str) -> None:
    """Of searches that are all selected together."""
    with kernels_noted(), torch.inference_mode():
        rules = SEARCHES[search]._replace(width=WIDTH)
        step = with_masks(WeightlessStep(rules, 20, VOCAB_SIZE, most_children=MOST_CHILDREN))
        with MemoryCounter() as counter:
            step.select(np.full(20, 25))
    assert 0 < counter.most <= profiled(20 * WIDTH)


@pytest.mark.parametrize("width", sweep({str(width): width for width in (1, 4, WIDTH)}, "4"))
@pytest.mark.parametrize(
    "search", [name for name, rules in SEARCHES.items() if not is_light_search_step(rules._replace(width=4))]
)
def test_several_searches_hold_no_more_than_was_profiled(search: str, width: int, num_parts: int) -> None:
    num_groups, rules = 2 * WIDTH // width, SEARCHES[search]._replace(width=width)
    if isinstance(rules.strategy, DiverseGroupsStrategy):
        rules = rules._replace(strategy=DiverseGroupsStrategy(width, 0.5, 0))
    with kernels_noted(), torch.inference_mode():
        step = with_masks(WeightlessStep(rules, num_groups, VOCAB_SIZE, most_children=MOST_CHILDREN))
        with MemoryCounter() as counter:
            step.select(np.full(num_groups, 25))
    assert 0 < counter.most <= profiled(2 * WIDTH, num_parts) + SMALL


@pytest.mark.parametrize(
    ("max_num_seqs", "max_beam_width", "vocab_size", "most"),
    [(512, 8, 150_000, 64), (512, None, 150_000, 512), (512, 100, 150_000, 100), (512, 8, 500_000, 20)],
)
def test_the_widest_search_decides_or_a_part(
    max_num_seqs: int, max_beam_width: int | None, vocab_size: int, most: int
) -> None:
    options = {PLUGIN_NAME: {} if max_beam_width is None else {"max_beam_width": max_beam_width}}
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        model_config=SimpleNamespace(get_vocab_size=lambda: vocab_size),
        additional_config=options,
    )
    assert most_heavy_rows_measured(config) == most


def test_as_much_is_set_aside_as_the_log_says(num_parts: int) -> None:
    for num_rows in (WIDTH, 20 * WIDTH):
        said = most_bytes_at_startup(num_rows, VOCAB_SIZE, WIDTH)
        assert 0.9 * said < profiled(num_rows, num_parts) <= said + SMALL


def test_what_is_set_aside_grows_no_more() -> None:
    """That of 64 rows, and of so many that it is far more."""
    at_most = {64: 63 * 64, 1024: 28 * 1024 + 60 * 65}
    for num_rows, num_bytes in at_most.items():
        assert most_bytes_at_startup(num_rows, 151_936, num_rows) <= num_bytes * 151_936
    assert most_bytes_at_startup(1000, 151_936, 1) <= 14 * 1000 * 151_936


@pytest.mark.parametrize("content", [0.0, float("nan")])
def test_the_widest_steps_can_be_taken(content: float) -> None:
    """Whatever the logits hold while vLLM measures: tensors with content must be read where they have some."""
    take_widest_startup_steps(torch.full((3, 700), content, dtype=torch.bfloat16), 2, MOST_LOGPROBS)


def test_bytes_are_those_of_storages_that_are_held() -> None:
    with MemoryCounter() as counter:
        values = nowhere(1000)
        view = values[10:].view(2, -1)
        del values
        assert (counter.held, counter.most) == (8000, 8000)
        other = view.int()
        assert (counter.held, counter.most) == (8000 + 3960, 8000 + 3960)
        view.add_(1)
        del view, other
        assert (counter.held, counter.most) == (0, 8000 + 3960)


def spec_of(layer: torch.Tensor) -> FullAttentionSpec:
    """[blocks, block size, heads, keys and values]"""
    _, block_size, num_kv_heads, head_size = layer.shape
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size // 2, dtype=layer.dtype
    )


NO_DRAFTS = RunnerSpeculation()


class ProfiledRunner(BeamModelRunner):
    """A runner, as far as it is profiled: with 3 rows, and two KV cache groups."""

    layers: ClassVar = [nowhere(9, 16, 2, 64, dtype=torch.float32)] * 2 + [nowhere(9, 32, 1, 8, dtype=torch.bfloat16)]

    def __init__(self, device: torch.device = NOWHERE, speculation: Any = NO_DRAFTS, graphs: Any = None) -> None:
        self.device, self.speculation, self.sampler = device, speculation, SimpleNamespace()
        self.selector: Any = SimpleNamespace(graphs=graphs)
        self.narrow_head: Any = SimpleNamespace(most_tokens=lambda _: 0)
        self.catalogs = RowCatalogs(device, room=1000)
        self.speculator = None
        self.model = SimpleNamespace(compute_logits=lambda states: states)
        self.model_config = SimpleNamespace(max_logprobs=7, get_vocab_size=lambda: 8)
        self.vllm_config: Any = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=3),
            model_config=self.model_config,
            additional_config={},
            speculative_config=SimpleNamespace(num_speculative_tokens=2),
        )

    def get_kv_cache_spec(self) -> Any:
        return {str(number): spec_of(layer) for number, layer in enumerate(self.layers)}


@pytest.mark.parametrize("has_head", [False, True])
def test_as_much_is_held_as_accepted_drafts_hold_while_they_move(has_head: bool) -> None:
    runner: Any = ProfiledRunner()
    cpu = [torch.zeros(layer.shape, dtype=layer.dtype) for layer in runner.layers]
    of_groups = [[ByToken(layer, layer.shape[1:2]) for layer in of_group] for of_group in (cpu[:2], cpu[2:])]
    if has_head:
        runner.speculator = object.__new__(EagleSpeculator)
        runner.speculator.hidden_size, runner.speculator.dtype = 24, torch.bfloat16
        of_groups[0].append(ByToken(torch.zeros(9, 16, 24, dtype=torch.bfloat16), (16,)))
    segments = KVCaches(cpu, 1, of_groups).token_segments
    with MemoryCounter() as counter:
        take_widest_draft_move(runner)
    assert counter.most == 3 * 2 * segments.total_words * segments.word_bytes
    assert counter.held == 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("speculates", [False, True])
def test_steps_are_taken_where_vllm_profiles_a_device(
    monkeypatch: pytest.MonkeyPatch, device: str, speculates: bool
) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(GPUModelRunner, "_dummy_sampler_run", lambda *_: taken.append("vLLM's"))
    monkeypatch.setattr(widest_steps, "take_widest_startup_steps", lambda *arguments: taken.append(arguments[1:]))
    speculation = SimpleNamespace(take_memory=lambda: taken.append(())) if speculates else NO_DRAFTS
    ProfiledRunner(torch.device(device), speculation)._dummy_sampler_run(nowhere(3, 8))
    moves, steps = [()] * speculates, [(64, 7)]
    assert taken == ["vLLM's", *(moves + steps if device == "meta" else [])]


def test_what_graphs_and_requests_bring_is_held_as_long_as_vllm_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Any = SimpleNamespace(device=NOWHERE, all_tokens=nowhere(3, 8))
    graphs, held = SelectionGraphs(rows, torch.bfloat16, TakenAgain(), 8000), list[int]()
    with MemoryCounter() as counter:
        monkeypatch.setattr(GPUModelRunner, "profile_run", lambda _: held.append(counter.held))
        ProfiledRunner(NOWHERE, graphs=graphs).profile_run()
        ProfiledRunner(NOWHERE).profile_run()
    needed = selection_graphs.BYTES_OF_LOGIT * selection_graphs.MOST_COPIED + 8000 // selection_graphs.LOGITS_OF_BYTE
    needed += selection_graphs.MOST_BYTES_WITHOUT_LOGITS + selection_graphs.MOST_OWN_BYTES
    assert (held, counter.held) == ([1000 + needed, 1000], 0)
