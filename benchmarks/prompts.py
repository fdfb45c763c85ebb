"""Sets of prompts: the built-in one, beginnings of held-out functions, and JSON Lines files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.stdlib_pair.corpus import held_out_prompts, held_out_text

LONGEST = 768  # tokens of a prompt as it is; of longer ones the end is kept


@dataclass(frozen=True)
class PromptSet:
    """Prompts of a file, one JSON object a line, gzipped or not; without one, the built-in set.

    Args:
        name: As tables show it.
        path: Of the file.
        prompt_field: Which of an object's fields holds the prompt.
    """

    name: str
    path: Path | None = None
    prompt_field: str = "prompt"

    def texts(self, count: int) -> list[str]:
        """The first `count` prompts.

        Raises:
            ValueError: there are fewer, or a line has no such field.
        """
        if self.path is None:
            return held_out_prompts(count)
        texts = list(islice(self._all_texts(), count))
        if len(texts) < count:
            raise ValueError(f"--prompts {self.path}: {len(texts)} prompts, and this run needs {count}")
        return texts

    def objects(self) -> Iterator[dict[str, Any]]:
        """What its file holds, line by line; nothing of the built-in set.

        Raises:
            ValueError: a line has no such field.
        """
        if self.path is None:
            return
        with gzip.open(self.path, "rt") if self.path.suffix == ".gz" else self.path.open() as lines:
            for number, line in enumerate(lines, start=1):
                found = json.loads(line)
                if self.prompt_field not in found:
                    fault = f"line {number} of {self.path} has {', '.join(found)} and no such field"
                    raise ValueError(f"--field {self.prompt_field}: {fault}")
                yield found

    def _all_texts(self) -> Iterator[str]:
        return (found[self.prompt_field] for found in self.objects())

    def tokens(self, model: str, count: int, num_tokens: int | None = None) -> list[list[int]]:
        """Token ids of `count` prompts.

        Args:
            model: Whose tokenizer.
            num_tokens: Of each: stretches of the whole text; None: the prompts as they are.
        """
        tokenizer = _tokenizer(model)
        num_first = len(tokenizer("")["input_ids"])  # what the tokenizer puts in front
        if num_tokens is None:
            every = [tokenizer(text)["input_ids"] for text in self.texts(count)]
            return [[*one[:num_first], *one[num_first:][num_first - LONGEST :]] for one in every]
        # A token is seldom longer than 12 characters.
        tokens = tokenizer(self._whole_text(12 * count * num_tokens))["input_ids"]
        start, body = tokens[:num_first], tokens[num_first:]
        own = num_tokens - len(start)
        if len(body) < count * own:
            raise ValueError(f"prompts {self.name}: too little text for {count} prompts of {num_tokens} tokens")
        return [start + body[i * own : (i + 1) * own] for i in range(count)]

    def _whole_text(self, num_characters: int) -> str:
        if self.path is None:
            return held_out_text()[:num_characters]
        texts: list[str] = []
        for text in self._all_texts():
            texts.append(text)
            num_characters -= len(text)
            if num_characters <= 0:
                break
        return "\n".join(texts)


CODE = PromptSet("code")


@cache
def _tokenizer(model: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)
