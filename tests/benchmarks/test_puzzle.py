"""The puzzle's answers are judged by arithmetic, its splits share no numbers, its table compares at equal tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.harness import Bench, Setting
from benchmarks.puzzle import TARGET, VALUE
from benchmarks.puzzle.countdown import SPLITS, Puzzle, a_solution, is_solved, puzzles, solutions
from benchmarks.puzzle.value import ValueScorer
from benchmarks.tables import puzzle as table
from vllm_trie import StepCandidate

PUZZLE = Puzzle((3, 7, 12, 10), 32)
MEGABYTE = 1 << 20


@pytest.mark.parametrize("answer", ["10+7=17\n17+3=20\n12+20=32", "7+3=10\n10+10=20\n20+12=32\n"])
def test_an_answer_that_uses_all_numbers_and_ends_at_the_target_solves_a_puzzle(answer: str) -> None:
    assert is_solved(PUZZLE, answer)


@pytest.mark.parametrize(
    "answer",
    [
        "10+7=17\n17+3=20\n20-12=8",  # ends elsewhere
        "10*3=30\n12-7=5\n30+5=35",
        "12+10=22\n7+3=10",  # uses too few lines
        "10+7=17\n10+3=13\n17+13=30",  # uses a number twice
        "10+7=17\n16+3=19\n20+12=32",  # uses a number that is not there
        "10+7=16\n16+3=19\n20+12=32",  # computes wrong
        "10+7=17\n17+3=20\n12+20=32\n32-0=32",  # goes on
        "10+7=17\n17+3=20\nthirty-two",
        "12+20=32",
        "",
    ],
)
def test_an_answer_that_breaks_a_rule_or_ends_elsewhere_solves_none(answer: str) -> None:
    assert not is_solved(PUZZLE, answer)


def test_solutions_that_are_sampled_for_training_solve_their_puzzles() -> None:
    rng = random.Random(0)
    for puzzle in puzzles("train", 50):
        found = {a_solution(puzzle, rng) for _ in range(10)}
        assert all(is_solved(puzzle, answer) for answer in found)
        assert len(found) <= solutions(tuple(sorted(puzzle.numbers)), puzzle.target)


def test_splits_have_no_numbers_in_common_and_puzzles_come_once() -> None:
    sampled = {split: puzzles(split, 300) for split in SPLITS}
    numbers = [{tuple(sorted(puzzle.numbers)) for puzzle in of_split} for of_split in sampled.values()]
    assert sum(map(len, numbers)) == len(set().union(*numbers))
    keys = {(tuple(sorted(puzzle.numbers)), puzzle.target) for puzzle in sampled["test"]}
    assert len(keys) == 300
    assert puzzles("test", 10) == sampled["test"][:10]
    with pytest.raises(ValueError, match="count=10000 puzzles asked for; 'test' has"):
        puzzles("test", 10_000)


def test_what_is_committed_is_small_and_writes_lines_as_tokens() -> None:
    assert sum(path.stat().st_size for folder in (TARGET, VALUE) for path in folder.iterdir()) < 4 * MEGABYTE
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    text = "3 7 12 10=32\n10+7=17\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(ids) == 1 + 10 + 6


def test_the_value_network_tells_right_ends_from_wrong_ones() -> None:
    """It has seen neither these puzzles nor a solver; of two ends of a puzzle the right one is mostly worth more."""
    scorer, rng, found = ValueScorer(), random.Random(0), 0
    given = puzzles("test", 50)
    for puzzle in given:
        *lines, last = a_solution(puzzle, rng).split("\n")
        before, result = "\n".join(lines), int(last.partition("=")[2])
        other = f"{last.partition('=')[0]}={result - 1}"
        ends = [StepCandidate(puzzle.prompt, (f"{before}\n{end}",), (), (), True) for end in (last, other)]
        right, wrong = scorer(ends)
        found += right > wrong
    assert found >= 40


class StandIn:
    """In place of an engine: a search by steps that solves every puzzle but the first, and samples that take turns."""

    def __init__(self, given: Sequence[Puzzle]) -> None:
        self._right = {puzzle.prompt: a_solution(puzzle, random.Random(0)) for puzzle in given}
        self._first = given[0].prompt
        self._num_tokens = 0

    def generate(self, prompts: Sequence[str], params: Any, use_tqdm: bool) -> list[Any]:
        of_each = params if isinstance(params, list) else [params] * len(prompts)
        return [self._answer(*pair) for pair in zip(prompts, of_each, strict=True)]

    def _answer(self, prompt: str, params: Any) -> Any:
        right, wrong = self._right[prompt], "1+1=2"
        asked = params.extra_args or {}
        if asked.get("unit") == "step":
            texts = [wrong if prompt == self._first else right]
            asked["scorer"]([StepCandidate(prompt, (right,), tuple(range(18)), (), True)])
            asked["scorer"]([StepCandidate(prompt, (right,), (1, token), (), True) for token in range(18)])
            self._num_tokens += asked["candidates"] * 2 * 18
        else:
            texts = [wrong, wrong, right, *[right] * params.n][: params.n]
        outputs = [SimpleNamespace(text=text, token_ids=[*range(18)], finish_reason="stop") for text in texts]
        return SimpleNamespace(outputs=outputs, prompt_token_ids=[*range(11)])

    def get_metrics(self) -> list[Any]:
        return [SimpleNamespace(name="vllm:generation_tokens", value=self._num_tokens)]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench(Setting(size="minimal"))
    monkeypatch.setattr(bench, "engine", lambda *_, **__: StandIn(puzzles("test", 2)))
    return bench


def test_best_of_n_gets_the_tokens_of_even_allotment_and_every_row_is_judged_beside_it(bench: Bench) -> None:
    rows, _ = table.measure(bench, 4)
    by_search = {row[1]: dict(zip(table.TABLE.columns, row, strict=True)) for row in rows}
    even, best, majority = (by_search[name] for name in ("even", "best of n", "majority"))
    assert (even["tokens"], best["tokens"], majority["tokens"]) == (72.0, 72.0, 72.0)
    assert [row["solved, % (95 %)"].split()[0] for row in (even, best, majority)] == ["50.0", "100.0", "0.0"]
    assert (best["alone"], best["even alone"], best["p"]) == (1, 0, "1.000")
    assert even["KV tokens, most"] == 11 + 19
    assert best["KV tokens, most"] == 11 + 18
    assert [by_search[name]["solved, % (95 %)"].split()[0] for name in ("beams", "best of beams")] == ["0.0", "100.0"]
    assert by_search["beams"]["tokens"] == 72.0


def test_greedy_search_is_a_row_of_its_own(bench: Bench) -> None:
    (row,), _ = table.measure(bench, 1)
    assert row[1] == "greedy"


def test_samples_cost_at_least_what_is_asked_and_one_less_would_not() -> None:
    token_ids = [[[0] * 10, [0] * 5, [0] * 10], [[0] * 8, [0] * 9, [0] * 1]]
    assert table.samples_costing(18, token_ids) == (1, 18)
    assert table.samples_costing(19, token_ids) == (2, 32)
    with pytest.raises(RuntimeError, match="3 samples per puzzle have 43 tokens, and 44 are needed"):
        table.samples_costing(44, token_ids)
