"""The published trie search finds what a plain loop over its rules finds, and holds the nodes that it must."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.tridecode import Found, PublishedTrieSearch
from tests.support.engine import TRAINED_TARGET
from tests.support.loop import loop_beams, one_thread
from tests.support.reference import Answer, agree, load

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

EOS, WIDTHS, MAX_TOKENS = 1, (2, 3, 5), 24
DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(2, 300) for _ in range(DRAW.randrange(1, 20))] for _ in range(8)]
Beams = list[list[int]]


def found(model: Any, prompt: list[int], width: int, interval: int | None = 3, eos: int | None = EOS) -> Found:
    with one_thread():
        return PublishedTrieSearch(model, interval).search(prompt, width, MAX_TOKENS, eos)


def expected(model: Path, prompt: list[int], width: int, eos: int | None = EOS) -> tuple[Answer, list[Beams]]:
    """The loop's best hypothesis, and the generated tokens of the beams that it feeds after each step but the last."""
    fed: dict[int, Beams] = {}

    def record(logits: torch.Tensor, prompt: list[int], generated: list[int]) -> torch.Tensor:
        fed.setdefault(len(generated), []).append(generated)
        return logits

    (best,) = loop_beams(model, prompt, width, 1, MAX_TOKENS, semantics="tridecode", eos=eos, adjust=record)
    return best, [fed[length] for length in range(1, len(fed))]


def num_live_nodes(prompt: list[int], beams: Beams) -> int:
    """The prompt's, and the distinct prefixes of beams whose newest tokens are not in the cache yet."""
    return len(prompt) + len({tuple(beam[:end]) for beam in beams for end in range(1, len(beam))})


def answer(result: Found) -> list[Answer]:
    return [Answer(result.tokens, result.score)]


@pytest.fixture
def grouped(random_model: Callable[[str], Path]) -> Path:
    """A random Llama with grouped heads that ends hypotheses often."""
    return random_model("gqa")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_search_finds_what_the_loop_finds(grouped: Path, attention: str, width: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(grouped, dtype=torch.float32, attn_implementation=attention).eval()
    ended = began_with_eos = 0
    for prompt in PROMPTS:
        best, fed = expected(grouped, prompt, width)
        result = found(model, prompt, width)
        assert agree(answer(result), [best])
        assert result.steps == len(fed) + 1 == len(result.nodes) == len(result.step_seconds) + 1
        ended += result.steps < MAX_TOKENS
        began_with_eos += result.tokens[0] == EOS
    assert min(ended, began_with_eos) > 0, "the rules that set it apart must come into play"


@pytest.mark.parametrize("width", WIDTHS)
def test_search_on_the_trained_model_finds_what_the_loop_finds(width: int) -> None:
    for prompt, eos in zip(PROMPTS[:3], (None, 13, 15), strict=True):
        best, _ = expected(TRAINED_TARGET, prompt, width, eos)
        assert agree(answer(found(load(TRAINED_TARGET), prompt, width, eos=eos)), [best])


@pytest.mark.parametrize("width", WIDTHS)
def test_reclaiming_changes_the_nodes_held_and_nothing_else(width: int) -> None:
    for prompt in PROMPTS[:3]:  # of the trained model: a near-tie of a random one would change which nodes live
        _, fed = expected(TRAINED_TARGET, prompt, width, eos=None)
        live = [num_live_nodes(prompt, beams) for beams in fed]
        every, third, never = (found(load(TRAINED_TARGET), prompt, width, interval, None) for interval in (1, 3, None))
        assert every.tokens == third.tokens == never.tokens
        assert [every.score, third.score] == pytest.approx([never.score] * 2, rel=1e-5)

        assert every.nodes == [*live, live[-1] + width], "the last step has nothing left to reclaim for"
        assert never.nodes == [len(prompt) + step * width for step in range(MAX_TOKENS)]
        assert third.nodes == [live[step - step % 3] + step % 3 * width for step in range(MAX_TOKENS)]
        assert sum(every.nodes) < sum(third.nodes) < sum(never.nodes)
        of_steps = [len(result.reclaim_seconds) for result in (every, third, never)]
        assert of_steps == [MAX_TOKENS - 2, (MAX_TOKENS - 2) // 3, 0]


@contextmanager
def tampered(model: Any, tamper: Callable[[dict[str, Any]], None]) -> Iterator[Any]:
    """Within it, the model takes what `tamper` makes of the arguments of the forwards after the prompt's."""

    def before(_: Any, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "attention_mask" in options:
            tamper(options)
        return args, options

    hook = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield model
    finally:
        hook.remove()


def show_siblings(options: dict[str, Any]) -> None:
    width = options["attention_mask"].shape[-2]
    options["attention_mask"][..., -width:] = 0


def count_nodes_as_depth(options: dict[str, Any]) -> None:
    num_nodes, width = options["attention_mask"].shape[-1], options["attention_mask"].shape[-2]
    options["position_ids"] = torch.arange(num_nodes - width, num_nodes)[None]


@pytest.mark.parametrize("tamper", [show_siblings, count_nodes_as_depth])
def test_a_wrong_mask_or_position_changes_the_score(grouped: Path, tamper: Callable[[dict[str, Any]], None]) -> None:
    right = found(load(grouped), PROMPTS[0], 3)
    with tampered(load(grouped), tamper) as model:
        wrong = found(model, PROMPTS[0], 3)
    assert abs(wrong.score - right.score) > 1e-2


def test_what_cannot_be_searched_is_refused(grouped: Path, random_model: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="full attention"):
        PublishedTrieSearch(load(random_model("mistral")))
    flex = AutoModelForCausalLM.from_pretrained(grouped, attn_implementation="flex_attention")
    with pytest.raises(ValueError, match='attn_implementation="flex_attention" takes no such mask'):
        PublishedTrieSearch(flex)
    with pytest.raises(ValueError, match="reclaim_interval=0 must be at least 1"):
        PublishedTrieSearch(load(grouped), reclaim_interval=0)
    with pytest.raises(ValueError, match="width=0"):
        found(load(grouped), PROMPTS[0], 0)
