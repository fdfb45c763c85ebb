"""What beams are worth, by search, on tasks that a file of `--prompts` holds.

The fields of its objects tell what they are: functions that must pass their tests (HumanEval: pass@1), sums (GSM8K),
problems (MATH), questions about a text (SQuAD: exact match), articles to summarize (CNN/DailyMail: ROUGE-L).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from scipy import stats

from benchmarks.common import generate
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.metrics import boxed, exact_match, number_of, rouge_l
from benchmarks.sandbox import which_succeed
from benchmarks.significance import Interval, interval, shown_p
from vllm_trie import beam_params

END_OF_FUNCTION = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```", "\nassert")
FUNCTION = "Complete this Python function.\n\n```python\n{}\n```"
QUESTION = "{}\nSolve this step by step. Write the answer as a number in the last line, after ####."
PROBLEM = "{}\nSolve this step by step. Write the answer in the last line, as \\boxed{{answer}}."
READING = "{}\n\nAnswer with a few words of this text: {}"
ARTICLE, MOST_CHARACTERS = "{}\n\nSummarize this article in three sentences.", 3000  # of an article
GREEDY = "greedy"
TEMPERATURE, SEED = 0.7, 1
NUM_TOKENS = 160


def params_by_search(num_tokens: int, stop: Sequence[str]) -> dict[str, Any]:
    """How answers are searched for; all of the same length at most."""
    from vllm import SamplingParams

    options: dict[str, Any] = {"max_tokens": num_tokens, "stop": list(stop)}
    sampled = {"do_sample": True, "temperature": TEMPERATURE, "seed": SEED}
    return {
        GREEDY: SamplingParams(temperature=0, logprobs=0, **options),
        "4 beams": beam_params(4, **options),
        "8 beams": beam_params(8, **options),
        "beam sampling, 4": beam_params(4, **sampled, **options),
    }


class Kind(NamedTuple):
    """A kind of task, known by the fields of its objects."""

    fields: frozenset[str]
    metric: str
    stop: Sequence[str]
    prompt: Callable[[Any, dict[str, Any]], str]  # of a tokenizer and a task
    scores: Callable[[Sequence[dict[str, Any]], Sequence[str]], Sequence[float]]  # from 0 to 1


def functions_pass(tasks: Sequence[dict[str, Any]], answers: Sequence[str]) -> list[bool]:
    """Whether each function, completed, passes the tests of its task."""
    programs = [
        f"{beginning(task)}{answer}\n\n{task['test']}\n\ncheck({task['entry_point']})\n"
        for task, answer in zip(tasks, answers, strict=True)
    ]
    return which_succeed(programs)


def sums_are_right(tasks: Sequence[dict[str, Any]], answers: Sequence[str]) -> list[bool]:
    """Whether each answer's number is that of its task."""
    return [number_of(answer) == number_of(task["answer"]) for task, answer in zip(tasks, answers, strict=True)]


def problems_are_solved(tasks: Sequence[dict[str, Any]], answers: Sequence[str]) -> list[bool]:
    """Whether what each answer puts into a box is the answer of its task."""
    return [boxed(answer) == "".join(task["answer"].split()) for task, answer in zip(tasks, answers, strict=True)]


def first_lines_match(tasks: Sequence[dict[str, Any]], answers: Sequence[str]) -> list[float]:
    """Whether the first line of each answer is one of the references."""
    firsts = [(answer.strip().splitlines() or [""])[0] for answer in answers]
    return [exact_match(first, task["answers"]["text"]) for task, first in zip(tasks, firsts, strict=True)]


def summaries(tasks: Sequence[dict[str, Any]], answers: Sequence[str]) -> list[float]:
    """ROUGE-L of each answer, against the highlights of its article."""
    return [rouge_l(answer, task["highlights"]) for task, answer in zip(tasks, answers, strict=True)]


def asking(request: Callable[[dict[str, Any]], str]) -> Callable[[Any, dict[str, Any]], str]:
    """What asks for this, as a turn of a chat, for models that know chats."""

    def prompt(tokenizer: Any, task: dict[str, Any]) -> str:
        asked = request(task)
        return as_chat(tokenizer, asked) if tokenizer.chat_template else f"{asked}\n"

    return prompt


def function_to_complete(tokenizer: Any, task: dict[str, Any]) -> str:
    """A function's beginning; for models that know chats, as the beginning of an answer."""
    start = beginning(task)
    return f"{as_chat(tokenizer, FUNCTION.format(start))}```python\n{start}" if tokenizer.chat_template else start


def beginning(task: dict[str, Any]) -> str:
    """What a function is completed from: without the line's end, which is one token with what comes after it."""
    return task["prompt"].rstrip()


def as_chat(tokenizer: Any, request: str) -> str:
    """A user's turn, up to where the answer begins."""
    turn = [{"role": "user", "content": request}]
    return tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)


KINDS = (
    Kind(frozenset({"prompt", "test", "entry_point"}), "pass@1", END_OF_FUNCTION, function_to_complete, functions_pass),
    Kind(
        frozenset({"question", "answer"}),
        "exact match",
        (),
        asking(lambda task: QUESTION.format(task["question"])),
        sums_are_right,
    ),
    Kind(
        frozenset({"problem", "answer"}),
        "exact match",
        (),
        asking(lambda task: PROBLEM.format(task["problem"])),
        problems_are_solved,
    ),
    Kind(
        frozenset({"context", "question", "answers"}),
        "exact match",
        (),
        asking(lambda task: READING.format(task["context"], task["question"])),
        first_lines_match,
    ),
    Kind(
        frozenset({"article", "highlights"}),
        "ROUGE-L",
        (),
        asking(lambda task: ARTICLE.format(task["article"][:MOST_CHARACTERS])),
        summaries,
    ),
)


def cells(setting: Setting) -> list[Cell]:
    return [(prompts.name,) for prompts in setting.prompts if prompts.path is not None]


def measure(bench: Bench, set_name: str) -> Measured:
    """All searches on the same tasks, each in one batch."""
    setting = bench.setting
    prompts = setting.prompt_set(set_name)
    tasks = [task for task, _ in zip(prompts.objects(), range(setting.pick(2, 40, 164)), strict=False)]
    kind = next((kind for kind in KINDS if kind.fields <= tasks[0].keys()), None)
    if kind is None:
        raise ValueError(
            f"--prompts {prompts.path}: {', '.join(tasks[0])} are the fields of no task that is known here"
        )
    llm = bench.engine()
    texts = [kind.prompt(llm.get_tokenizer(), task) for task in tasks]
    rows, scores = list[Cell](), dict[str, Sequence[float]]()
    for name, params in params_by_search(
        setting.max_tokens or setting.pick(16, NUM_TOKENS, NUM_TOKENS), kind.stop
    ).items():
        best = [output.outputs[0] for output in generate(llm, texts, params)]
        scores[name] = kind.scores(tasks, [answer.text for answer in best])
        mean = statistics.fmean(answer.cumulative_logprob / len(answer.token_ids) for answer in best)
        rows.append(
            (set_name, kind.metric, name, *comparison_cells(scores[name], scores[GREEDY], name == GREEDY), mean)
        )
    return Measured(rows, {f"scores, {name}": list(map(float, found)) for name, found in scores.items()})


def comparison_cells(scores: Sequence[float], by_greedy: Sequence[float], is_greedy: bool) -> Cell:
    """The score in percent with its interval, of how many tasks; those that either search does better; the test's p."""
    mean, low, high = (100 * bound for bound in _interval(scores))
    shown = f"{mean:.1f} ({low:.1f}–{high:.1f})" if low == low else f"{mean:.1f}"
    if is_greedy:
        return shown, len(scores), "", "", ""
    gained, lost = discordant(scores, by_greedy)
    return shown, len(scores), gained, lost, shown_p(mcnemar(gained, lost))


def _interval(scores: Sequence[float]) -> Interval:
    """Wilson's where tasks are solved or not, else Student's."""
    if any(score not in (0, 1) for score in scores):
        return interval(scores)
    solved = int(sum(scores))
    share = stats.binomtest(solved, len(scores)).proportion_ci(method="wilson")
    return Interval(solved / len(scores), share.low, share.high)


def discordant(scores: Sequence[float], by_greedy: Sequence[float]) -> tuple[int, int]:
    """Tasks that this search does better, and that greedy search does."""
    pairs = list(zip(scores, by_greedy, strict=True))
    return sum(own > other for own, other in pairs), sum(other > own for own, other in pairs)


def mcnemar(gained: int, lost: int) -> float:
    """The p of McNemar's exact test: that chance alone divides the discordant pairs at least as unevenly.

    Of scores that are no yes or no, it is the sign test.
    """
    return float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


TABLE = Table(
    "Tasks, and how well they are done",
    ("set", "metric", "search", "% (95 %)", "of", "better", "greedy better", "p", "mean log p per token"),
    cells,
    measure,
    f"at most {NUM_TOKENS} tokens; the best hypothesis counts; pass@1: the function is completed up to its end (a "
    "model that knows chats is asked in one, and its answer begins with the prompt) and passes its tests in a process "
    "with limits; exact match: of the number behind ####, or the last one (GSM8K), of what is in the box (MATH), of "
    "the first line with any reference (SQuAD); ROUGE-L: F1, in lower case, no stemming; better: tasks that this "
    "search does and greedy search does not, or scores higher in; p: McNemar's exact test, for ROUGE-L the sign test; "
    f"intervals: Wilson's, for ROUGE-L Student's; beam sampling: temperature {TEMPERATURE}, seed {SEED}",
)
