"""Prompts of the kinds that people send."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.demo_prompts import NEWS, Task

TASKS = (
    Task("a fact", "The capital of France is", 32, is_chat=False),
    Task(
        "code", 'def is_palindrome(text: str) -> bool:\n    """Whether a text reads the same backwards."""\n', 32, False
    ),
    Task("a translation", "English: Good morning.\nSpanish: Buenos días.\nEnglish: Thank you.\nSpanish:", 32, False),
    Task("a chat", "Why is the sky blue? Answer in one sentence.", 32),
    Task("a summary", f"Summarize in one sentence: {NEWS}", 32),
    Task("a sum", "Anna has 3 apples and buys 4 more. How many apples does she have?", 32),
)


@pytest.fixture(scope="session")
def prompts(real_model: Path) -> list[list[int]]:
    """Token ids of `TASKS`."""
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    return [tokenizer(task.prompt(tokenizer))["input_ids"] for task in TASKS]
