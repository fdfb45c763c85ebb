"""What beams are worth: functions that pass their tests (HumanEval), sums that come out right (GSM8K), by search."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from scipy import stats

from benchmarks.common import generate
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.sandbox import which_succeed
from benchmarks.significance import shown_p
from vllm_trie import beam_params

END_OF_FUNCTION = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```", "\nassert")
FUNCTION = "Complete this Python function.\n\n```python\n{}\n```"
QUESTION = "{}\nSolve this step by step. Write the answer as a number in the last line, after ####."
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
GREEDY = "greedy"
TEMPERATURE, SEED = 0.7, 1
NUM_TOKENS = 160


def params_by_search(num_tokens: int, stop: Sequence[str]) -> dict[str, Any]:
    """How answers are searched for; all of the same length at most."""
    from vllm import SamplingParams

    options: dict[str, Any] = {"max_tokens": num_tokens, "stop": list(stop)}
    drawn = {"do_sample": True, "temperature": TEMPERATURE, "seed": SEED}
    return {
        GREEDY: SamplingParams(temperature=0, logprobs=0, **options),
        "4 beams": beam_params(4, **options),
        "8 beams": beam_params(8, **options),
        "beam sampling, 4": beam_params(4, **drawn, **options),
    }


class Kind(NamedTuple):
    """A kind of task, known by the fields of its objects."""

    fields: frozenset[str]
    stop: Sequence[str]
    prompt: Callable[[Any, dict[str, Any]], str]  # of a tokenizer and a task
    solved: Callable[[Sequence[dict[str, Any]], Sequence[str]], list[bool]]


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


def number_of(answer: str) -> float | None:
    """The first number behind the last ####, or else the last one there is."""
    _, mark, behind = answer.rpartition("####")
    found = NUMBER.findall(behind if mark else answer)
    return float(found[0 if mark else -1].replace(",", "")) if found else None


def question(tokenizer: Any, task: dict[str, Any]) -> str:
    """A question as a turn of a chat, for models that know chats."""
    request = QUESTION.format(task["question"])
    return as_chat(tokenizer, request) if tokenizer.chat_template else f"{request}\n"


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
    Kind(frozenset({"prompt", "test", "entry_point"}), END_OF_FUNCTION, function_to_complete, functions_pass),
    Kind(frozenset({"question", "answer"}), (), question, sums_are_right),
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
    rows, solved = list[Cell](), dict[str, list[bool]]()
    for name, params in params_by_search(
        setting.max_tokens or setting.pick(16, NUM_TOKENS, NUM_TOKENS), kind.stop
    ).items():
        best = [output.outputs[0] for output in generate(llm, texts, params)]
        solved[name] = kind.solved(tasks, [answer.text for answer in best])
        mean = statistics.fmean(answer.cumulative_logprob / len(answer.token_ids) for answer in best)
        rows.append((set_name, name, *told(solved[name], solved[GREEDY], name == GREEDY), mean))
    return Measured(rows, {f"solved, {name}": list(map(float, found)) for name, found in solved.items()})


def told(solved: Sequence[bool], by_greedy: Sequence[bool], is_greedy: bool) -> Cell:
    """How many, of how many, in percent with Wilson's interval; those that one of both alone solves; McNemar's p."""
    share = stats.binomtest(sum(solved), len(solved)).proportion_ci(method="wilson")
    percent = f"{100 * sum(solved) / len(solved):.1f} ({100 * share.low:.1f}–{100 * share.high:.1f})"
    if is_greedy:
        return sum(solved), len(solved), percent, "", "", ""
    gained, lost = discordant(solved, by_greedy)
    return sum(solved), len(solved), percent, gained, lost, shown_p(mcnemar(gained, lost))


def discordant(solved: Sequence[bool], by_greedy: Sequence[bool]) -> tuple[int, int]:
    """Tasks that this search alone solves, and that greedy search alone does."""
    pairs = list(zip(solved, by_greedy, strict=True))
    return sum(own and not other for own, other in pairs), sum(other and not own for own, other in pairs)


def mcnemar(gained: int, lost: int) -> float:
    """The p of McNemar's exact test: that chance alone divides the discordant pairs at least as unevenly."""
    return float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


TABLE = Table(
    "Tasks that are solved",
    ("set", "search", "solved", "of", "% (95 %)", "alone", "greedy alone", "p", "mean log p per token"),
    cells,
    measure,
    f"at most {NUM_TOKENS} tokens; the best hypothesis counts; HumanEval: the function is completed up to its end (a "
    "model that knows chats is asked in one, and its answer begins with the prompt) and runs with its tests in a "
    "process with limits; GSM8K: a turn of a chat, the number behind ####, or the last one; alone: tasks that this "
    "search solves and greedy search does not; p: McNemar's exact test; beam sampling: temperature "
    f"{TEMPERATURE}, seed {SEED}",
)
