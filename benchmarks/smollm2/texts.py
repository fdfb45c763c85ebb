"""Text that the model writes itself, for its draft model to learn from: `distill` reads it.

No other text is used, and none of what the benchmarks ask. A third are answers to tasks made of the lists below, a
third are whole conversations that the model makes up after the opening of its template, and a third go on from the
first words of documents and of code.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import torch

LONGEST = 320  # tokens that are written after each beginning
TEMPERATURES = (0.5, 0.8, 1.0)
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
TASKS = (
    "Explain {} to a child.",
    "Give me three facts about {}.",
    "Write a short paragraph about {}.",
    "Summarize what is known about {} in two sentences.",
    "What is the history of {}?",
    "Write a letter to a friend about {}.",
    "List the advantages and disadvantages of {}.",
    "Write a Python function that deals with {}, with a docstring and type hints.",
    "Write a Python class for {} and an example that uses it.",
    "Write a JSON object that describes {}, with five fields.",
    "Translate to French: I would like to know more about {}.",
    "Make up a word problem about {} with numbers, and solve it step by step.",
    "Compute step by step: {} cost 12 dollars each. How much do 7 of them cost after a discount of 10 percent?",
    "Rewrite this sentence more politely: Tell me about {} now.",
    "Write an SQL query over a table about {}.",
    "What questions would you ask an expert on {}?",
)
TOPICS = (
    *(
        "the moon",
        "bread",
        "volcanoes",
        "the French Revolution",
        "prime numbers",
        "sorting a list",
        "bicycles",
        "whales",
    ),
    *("photosynthesis", "a bank account", "string reversal", "the Roman Empire", "tea", "climate change", "chess"),
    *("matrix multiplication", "electric cars", "dinosaurs", "a shopping list", "the human heart", "jazz", "rivers"),
    *(
        "binary search",
        "the stock market",
        "honey bees",
        "a library of books",
        "gravity",
        "football",
        "dates and times",
    ),
    *("Shakespeare", "the periodic table", "file paths", "earthquakes", "vaccines", "a queue", "Japan", "coffee"),
    *("temperature conversion", "the Great Wall of China", "graphs", "penguins", "a student and grades", "robots"),
    *("democracy", "counting words", "the Amazon rainforest", "palindromes", "light", "apples", "trains", "sleep"),
    *("parsing text", "the Olympic Games", "Fibonacci numbers", "oceans", "painting", "a calculator", "dogs", "cities"),
    *("money", "intervals", "brackets", "rockets", "the Internet", "birds", "triangles", "a list of integers"),
)
BEGINNINGS = (
    *(
        "def ",
        "def find_",
        "def is_",
        "def count_",
        "def get_",
        "from typing import List\n\n\ndef ",
        "class ",
        "import ",
    ),
    *(
        "#!/usr/bin/env python3\n",
        "The ",
        "In the ",
        "A ",
        "How to ",
        "One day, ",
        "According to ",
        "It is ",
        "There are ",
    ),
    *("Question: ", "# ", "## ", '{"name": "', "<html>\n", "SELECT ", "Dear ", "When ", "Scientists ", "If "),
    *(
        "from typing import List\n\n\ndef {}(numbers: List[int]) -> ",
        "def {}(text: str) -> ",
        "def {}(a: int, b: int) -> ",
    ),
)
FUNCTIONS = (
    "solve",
    "filter_by",
    "sum_of",
    "longest",
    "remove",
    "check",
    "split",
    "largest",
    "merge",
    "change",
    "parse",
)


def beginnings(seed: int) -> Iterator[str]:
    """Beginnings of all kinds in turn, without end."""
    rng = random.Random(seed)
    while True:
        task = rng.choice(TASKS).format(rng.choice(TOPICS))
        yield f"{SYSTEM}<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n"
        yield f"{SYSTEM}<|im_start|>user\n"
        yield rng.choice(BEGINNINGS).replace("{}", rng.choice(FUNCTIONS))  # one of them has a brace of its own


def write(model: Path, num_tokens: int, seed: int) -> list[list[int]]:
    """Token ids of texts that the model has sampled, each with its beginning, `num_tokens` or a few more in all.

    Args:
        model: Its folder.
        num_tokens: How much to write.
        seed: Another one gives other texts; the same one the same, on the same machine.
    """
    from vllm import LLM, SamplingParams

    limits = {"max_model_len": 512, "max_num_seqs": 256, "kv_cache_memory_bytes": 4 << 30}
    llm = LLM(str(model), dtype="bfloat16", enforce_eager=True, seed=seed, **limits)
    count = num_tokens // LONGEST + 1
    texts = [text for text, _ in zip(beginnings(seed), range(count), strict=False)]
    params = [
        SamplingParams(
            temperature=TEMPERATURES[number // 3 % len(TEMPERATURES)],
            max_tokens=LONGEST,
            min_tokens=24,
            # Nothing comes after an answer; what makes a conversation up has to continue.
            ignore_eos=number % 3 == 1,
        )
        for number in range(count)
    ]
    outputs = llm.generate(texts, params)
    return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]


def pack(texts: list[list[int]], length: int) -> torch.Tensor:
    """Texts one after the other, cut into rows: [rows, length] int32."""
    ids = torch.tensor([token for text in texts for token in text], dtype=torch.int32)
    return ids[: len(ids) // length * length].view(-1, length)
