"""What `make demo` runs on: a real model and what a person would ask it, or the toy that comes along."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import PAIR, TARGET, cpu_dtype
from benchmarks.smollm2 import get
from benchmarks.stdlib_pair.corpus import held_out_prompts

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
NEWS = (
    "The town library will close for two weeks in July. Workers will repair the roof, which has leaked since the storm "
    "in March. Books can be returned at the town hall."
)


@dataclass(frozen=True)
class Task:
    """One prompt, and what is said about it.

    Args:
        name: What is asked for.
        text: The prompt itself, or what a user says in a chat.
        max_tokens: Of the answer.
        is_chat: The model's chat template goes around the text.
        schema: A JSON schema that every answer must fit.
        note: What a reader of its table must know.
    """

    name: str
    text: str
    max_tokens: int
    is_chat: bool = True
    schema: dict[str, Any] | None = None
    note: str = ""

    def prompt(self, tokenizer: Any) -> str:
        """As the model reads it."""
        if not self.is_chat:
            return self.text
        turn = [{"role": "user", "content": self.text}]
        return tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)


@dataclass(frozen=True)
class Subject:
    """A model, its draft model, and its tasks."""

    description: str  # what it is, for the terminal
    model: Path
    draft: Path
    dtype: str
    tasks: tuple[Task, ...]


def real() -> Subject:
    """SmolLM2, in the type that this CPU multiplies fastest.

    Raises:
        UnavailableError: it cannot be had here.
    """
    dtype = cpu_dtype()
    description = f"{get.NAME}: a chat model of 135 million parameters, in {dtype}"
    return Subject(description, get.target(), get.draft(), dtype, REAL_TASKS)


def toy(count: int = 4) -> Subject:
    """The model that comes along, and beginnings of functions that it has never seen."""
    tasks = (
        Task(f"function {number}", text, 40, is_chat=False) for number, text in enumerate(held_out_prompts(count), 1)
    )
    description = "the toy that comes along: 3.1 million parameters, trained on Python's standard library, in float32"
    return Subject(description, TARGET, PAIR / "draft", "float32", tuple(tasks))


REAL_TASKS = (
    Task("a fact", "What is the capital of France?", 16),
    Task(
        "a translation",
        "Spanish: Buenos días. English: Good morning.\nSpanish: Muchas gracias. English: Thank you very much.\n"
        "Spanish: ¿Dónde está la biblioteca? English:",
        5,
        is_chat=False,
    ),
    Task(
        "a summary",
        f"Summarize in one sentence: {NEWS}",
        40,
        note="In vLLM 0.32 its own loop divides log p by the tokens of prompt and answer together. So it "
        "ranks almost by log p alone, which favours shorter answers. A likelier answer is not always a better one.",
    ),
    Task(
        "a function",
        "def fibonacci(n):\n",
        48,
        is_chat=False,
        note="The prompt is this line as it stands, not a chat, and the model writes it once more.",
    ),
    Task(
        "JSON by a schema",
        "Extract the name, the age and the city as JSON: Anna is 34 years old and lives in Lyon.",
        40,
        schema=PERSON,
        note="One text can be made of different tokens: such answers are different hypotheses. For greedy decoding and "
        "for beams in the engine, log p is renormalised over the tokens that the schema allows. vLLM's own loop does "
        "not renormalise, so its log p is lower.",
    ),
    Task("a chat", "Why is the sky blue? Answer in one sentence.", 48),
)
