"""Accuracy against tokens of searches by steps, on a puzzle whose answers can be checked (`benchmarks.puzzle`).

All searches have the same model, the same learned scorer, and as many candidates in a round. Best-of-n and majority get
as many samples as even allotment computes tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import isqrt
from typing import Any, NamedTuple

from benchmarks import models
from benchmarks.common import generate
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.puzzle.countdown import COUNT, Puzzle, is_solved, puzzles
from benchmarks.puzzle.value import ValueScorer
from benchmarks.tables.tasks import comparison_cells
from vllm_trie import StepCandidate, beam_params

EVEN, GREEDY = "even", "greedy"
LINE = 6  # tokens
SEARCHES: dict[str, dict[str, Any]] = {
    EVEN: {},
    "rebase": {"allot": "rebase"},
    "rebase, prefer_shared=1": {"allot": "rebase", "prefer_shared": 1.0},
    "dvts": {"allot": "dvts"},
    "best": {"order": "best"},
    "mcts": {"order": "mcts"},
    f"lookahead={LINE}": {"lookahead": LINE},
}
MAX_TOKENS, TEMPERATURE = 24, 1.0
SEED_STRIDE = 1000

Scorer = Callable[[Sequence[StepCandidate]], Sequence[float]]


class Found(NamedTuple):
    """What a search found on all puzzles.

    Args:
        answers: One for each puzzle.
        num_tokens: That the model computed for all of them, beyond prompts.
        kv_tokens: Mean over puzzles of the most distinct tokens that the candidates of a round had, with the prompt;
            None where a round does not show what is held.
    """

    answers: list[str]
    num_tokens: int
    kv_tokens: float | None = None


class Watched:
    """A scorer that counts the distinct tokens of what it is shown, by round and prompt."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self.most: dict[str, int] = defaultdict(int)  # by prompt, without the prompt's

    def __call__(self, candidates: list[StepCandidate]) -> Sequence[float]:
        by_prompt = defaultdict(list)
        for candidate in candidates:
            by_prompt[candidate.prompt].append(candidate.token_ids)
        for prompt, shown in by_prompt.items():
            self.most[prompt] = max(self.most[prompt], distinct_tokens(shown))
        return self._scorer(candidates)


def distinct_tokens(sequences: Iterable[Sequence[int]]) -> int:
    """Nodes of the trie of these sequences."""
    return len({tuple(tokens[:length]) for tokens in sequences for length in range(1, len(tokens) + 1)})


def samples_costing(num_tokens: int, token_ids: Sequence[Sequence[Sequence[int]]]) -> tuple[int, int]:
    """The fewest samples per puzzle, as many for each, with at least so many tokens; and how many tokens they have.

    Args:
        token_ids: Of each puzzle's samples.

    Raises:
        RuntimeError: there are too few.
    """
    by_rank = [sum(map(len, of_rank)) for of_rank in zip(*token_ids, strict=True)]
    for count, total in enumerate(accumulate(by_rank), 1):
        if total >= num_tokens:
            return count, total
    raise RuntimeError(f"{len(by_rank)} samples per puzzle have {sum(by_rank)} tokens, and {num_tokens} are needed")


def cells(setting: Setting) -> list[Cell]:
    """Candidates of a round; 1: greedy search."""
    return [(budget,) for budget in setting.pick((4,), (1, 4, 16), (1, 4, 16, 64))]


def measure(bench: Bench, budget: int) -> Measured:
    """All searches with so many candidates in a round."""
    llm = bench.engine(models.PUZZLE, disable_log_stats=False)
    given = puzzles("test", bench.setting.pick(2, 40, 200))
    scorer = ValueScorer()
    found = {GREEDY: greedy(llm, given)} if budget == 1 else all_with(llm, given, scorer, budget)
    solved = {name: [is_solved(*pair) for pair in zip(given, of.answers, strict=True)] for name, of in found.items()}
    base = GREEDY if budget == 1 else EVEN
    rows = []
    for name, of in found.items():
        tokens, times = of.num_tokens / len(given), of.num_tokens / found[base].num_tokens
        kv = "" if of.kv_tokens is None else of.kv_tokens
        rows.append((budget, name, *comparison_cells(solved[name], solved[base], name == base), tokens, times, kv))
    return Measured(rows, {f"solved, {name}": list(map(float, of)) for name, of in solved.items()})


def all_with(llm: Any, given: Sequence[Puzzle], scorer: Scorer, budget: int) -> dict[str, Found]:
    """Every search by steps, and what as many tokens find without one."""
    found = {name: by_steps(llm, given, scorer, budget, options) for name, options in SEARCHES.items()}
    return found | by_samples(llm, given, scorer, budget, found[EVEN].num_tokens) | by_beams(llm, given, scorer, budget)


def greedy(llm: Any, given: Sequence[Puzzle]) -> Found:
    from vllm import SamplingParams

    outputs = generate(llm, prompts_of(given), SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    best = [output.outputs[0] for output in outputs]
    return Found([one.text for one in best], sum(len(one.token_ids) for one in best))


def by_steps(llm: Any, given: Sequence[Puzzle], scorer: Scorer, budget: int, options: dict[str, Any]) -> Found:
    """A search by steps whose beams are the square root of the budget, with as many candidates each.

    One that may go back has twice the rounds, of half the beams.
    """
    watched, width, candidates = Watched(scorer), isqrt(budget), budget // isqrt(budget)
    how = {"candidates": candidates, "step_stop": ["\n"], "scorer": watched, "temperature": TEMPERATURE, **options}
    if "order" in options:
        width, how["max_steps"] = width // 2, 2 * (COUNT - 1)
    params = [beam_params(width, unit="step", max_tokens=MAX_TOKENS, seed=seed, **how) for seed in seeds(given)]
    before = computed_tokens(llm)
    outputs = generate(llm, prompts_of(given), params)
    answers, computed = [output.outputs[0].text for output in outputs], computed_tokens(llm) - before
    if {"order", "lookahead"} & options.keys():  # which hold more than the candidates of a round
        return Found(answers, computed)
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    return Found(answers, computed, (prompts + sum(watched.most.values())) / len(given))


def by_samples(llm: Any, given: Sequence[Puzzle], scorer: Scorer, budget: int, num_tokens: int) -> dict[str, Found]:
    """The best sample by the scorer, and the most frequent one, of as many as have so many tokens."""
    from vllm import SamplingParams

    how = {"n": budget + budget // 4 + 2, "temperature": TEMPERATURE, "max_tokens": MAX_TOKENS}
    outputs = generate(llm, prompts_of(given), [SamplingParams(seed=seed, **how) for seed in seeds(given)])
    count, computed = samples_costing(num_tokens, [[sampled.token_ids for sampled in o.outputs] for o in outputs])
    for output in outputs:
        del output.outputs[count:]
    most_frequent = [Counter(sampled.text for sampled in output.outputs).most_common(1)[0][0] for output in outputs]
    best, kv_tokens = best_by(scorer, given, outputs), kv_tokens_of(outputs)
    return {"best of n": Found(best, computed, kv_tokens), "majority": Found(most_frequent, computed, kv_tokens)}


def by_beams(llm: Any, given: Sequence[Puzzle], scorer: Scorer, budget: int) -> dict[str, Found]:
    """Beam search over tokens with as many beams, and the best of its hypotheses by the scorer."""
    outputs = generate(llm, prompts_of(given), beam_params(budget, n=budget, max_tokens=MAX_TOKENS))
    computed = budget * sum(max(len(hypothesis.token_ids) for hypothesis in o.outputs) for o in outputs)
    likeliest, kv_tokens = [output.outputs[0].text for output in outputs], kv_tokens_of(outputs)
    return {
        "beams": Found(likeliest, computed, kv_tokens),
        "best of beams": Found(best_by(scorer, given, outputs), computed, kv_tokens),
    }


def best_by(scorer: Scorer, given: Sequence[Puzzle], outputs: Sequence[Any]) -> list[str]:
    """The best of each puzzle's answers by the scorer; the first of equal ones."""
    ends = [
        [StepCandidate(puzzle.prompt, (answer.text,), tuple(answer.token_ids), (), True) for answer in output.outputs]
        for puzzle, output in zip(given, outputs, strict=True)
    ]
    return [max(zip(scorer(of), of, strict=True), key=lambda pair: pair[0])[1].text for of in ends]


def kv_tokens_of(outputs: Sequence[Any]) -> float:
    """Distinct tokens of each prompt and its answers, mean of prompts."""
    answers = (distinct_tokens(answer.token_ids for answer in output.outputs) for output in outputs)
    return (sum(len(output.prompt_token_ids) for output in outputs) + sum(answers)) / len(outputs)


def seeds(given: Sequence[Puzzle]) -> range:
    """One for each, as far apart as samples of one puzzle count on from it."""
    return range(0, SEED_STRIDE * len(given), SEED_STRIDE)


def prompts_of(given: Sequence[Puzzle]) -> list[str]:
    return [puzzle.prompt for puzzle in given]


def computed_tokens(llm: Any) -> int:
    """Tokens that the engine has generated so far, for whatever request."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:generation_tokens")


TABLE = Table(
    "Searches by steps on a puzzle: accuracy against tokens",
    (
        *("candidates", "search", "solved, % (95 %)", "of", "alone", "even alone", "p"),
        *("tokens", "times even's tokens", "KV tokens, most"),
    ),
    cells,
    measure,
    "Countdown: four numbers, a target, three lines; a Llama of 0.8 M parameters, and a small network as scorer, which "
    "learned from the Llama's own answers to other puzzles; solved: all lines are right and end at the target; "
    "intervals: Wilson's; alone, even alone: puzzles that this search solves and even allotment does not, and the "
    "reverse; p: McNemar's exact test; candidates: of a round, from the square root of as many beams; best, mcts: half "
    "the beams, twice the rounds; lookahead: of one line; "
    f"temperature {TEMPERATURE}; tokens: generated per puzzle; best of n, majority: the "
    "fewest samples, the same number for all puzzles, with at least as many tokens as even allotment; beams: over "
    "tokens, by log-probability, a token per beam and step; best of n, best of beams: by the same scorer; KV tokens: "
    "distinct ones of the prompt and the candidates of a round, in the largest round, mean of puzzles",
)
