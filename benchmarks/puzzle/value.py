"""A small network that values partial answers, and what makes a scorer of a search by steps of it.

It sees the numbers that are left as the lines claim, and the target; after the last line, what that line computes. It
checks nothing: that 17 + 3 is 20, and what can be made of 20 and 12, it must learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.puzzle import VALUE
from benchmarks.puzzle.countdown import COUNT, GREATEST_RESULT, LINE
from vllm_trie import StepCandidate

FILE = "model.safetensors"
OPERATORS = "+-*"
NUM_NUMBERS, NUM_LINES = GREATEST_RESULT + 1, COUNT - 1
NUM_FEATURES = 4 * NUM_NUMBERS + COUNT + len(OPERATORS)  # left, target, operands; lines so far; operator


def untrained_value() -> torch.nn.Sequential:
    """A network of 0.08 M parameters: from [texts, `NUM_FEATURES`] to [texts, 1], the logit of being solved."""
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    return torch.nn.Sequential(linear(NUM_FEATURES, 256), relu(), linear(256, 128), relu(), linear(128, 1))


def features(prompt: str, text: str) -> torch.Tensor:
    """What the network sees of a prompt and the lines after it: [`NUM_FEATURES`]."""
    shown, _, target = prompt.strip().partition("=")
    left, lines = [int(number) for number in shown.split()], text.splitlines()
    matches = [match for match in map(LINE.fullmatch, lines) if match]
    for match in matches:
        a, b, result = (place(match[group]) for group in (1, 3, 4))
        for operand in (a, b):
            if operand in left:
                left.remove(operand)
        left.append(result)
    seen = torch.zeros(NUM_FEATURES)
    for number in left:
        seen[number] += 1
    seen[NUM_NUMBERS + int(target)] = 1
    seen[4 * NUM_NUMBERS + min(len(lines), NUM_LINES)] = 1
    if matches and len(lines) >= NUM_LINES:
        seen[2 * NUM_NUMBERS + a] = 1
        seen[3 * NUM_NUMBERS + b] = 1
        seen[4 * NUM_NUMBERS + COUNT + OPERATORS.index(matches[-1][2])] = 1
    return seen


def place(number: str) -> int:
    """Which feature tells of a number: those that are too great are one."""
    return min(int(number), GREATEST_RESULT)


def save_value(network: torch.nn.Sequential, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.to(torch.bfloat16) for name, weight in network.state_dict().items()}, folder / FILE)


def load_value(folder: Path) -> torch.nn.Sequential:
    network = untrained_value()
    network.load_state_dict({name: weight.float() for name, weight in load_file(folder / FILE).items()})
    return network.eval()


class ValueScorer:
    """Gives each candidate the probability, as the network has it, that its answer comes to be right.

    With a lookahead it judges what the model would write next, too. It computes each text once for all searches.

    Args:
        folder: Of the network.
    """

    def __init__(self, folder: Path = VALUE) -> None:
        self._network = load_value(folder)
        self._known: dict[tuple[str, str], float] = {}

    @torch.inference_mode()
    def __call__(self, candidates: Sequence[StepCandidate]) -> list[float]:
        texts = [(candidate.prompt, candidate.text_ahead) for candidate in candidates]
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            values = self._network(torch.stack([features(*text) for text in new])).squeeze(-1).sigmoid()
            self._known.update(zip(new, values.tolist(), strict=True))
        return [self._known[text] for text in texts]
