"""A token completes a stop string exactly where decoding everything that was generated says so."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer

from tests.support.calls import num_calls
from tests.support.engine import TRAINED_TARGET
from vllm_trie.detokenizing import detokenizing_function
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.stops import StopConstraints, StopStringConstraint
from vllm_trie.search.rules import SearchInputs, SearchRules
from vllm_trie.search.step import take_search_step
from vllm_trie.search.stop_strings import CONTEXT, FIRST_SPAN, SearchStopStrings, SearchTextEnd
from vllm_trie.search.strategies.best import BestStrategy

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
CHARACTERS = "aaabbb \né€😀"
PIECES = [
    *(b"a", b"b", b"aa", b"ab", b"aab", b"bab", b" ", b" a", b"a ", b"\n", b"b\na", b""),
    *("é".encode(), b"\xc3", b"\xa9", b"a\xc3", b"\xa9b", "€".encode(), b"\xe2", b"\x82", b"\xac", b"\x82\xac"),
    *(b"\xf0", b"\x9f", b"\x98", b"\x80", b"\x9f\x98", b"\x98\x80a"),
]
TOKEN = {piece: token for token, piece in enumerate(PIECES)}
HELD_OUT_TEXT = (TRAINED_TARGET.parent / "held_out.txt").read_text().replace("\n", "\nnaïve, 1 €: 😀! 日本語\n")
seeds = st.integers(0, 1 << 32)


def is_text(piece: bytes) -> bool:
    return INCOMPLETE not in piece.decode(errors="replace")


class Vocabulary(NamedTuple):
    """Tokens, and how a list of them is decoded."""

    pieces: list[bytes]
    decode: Callable[[list[int]], str]

    def random_ids(self, choose: random.Random, most: int) -> list[int]:
        """Any text, cut anywhere."""
        rest = "".join(choose.choices(CHARACTERS, k=choose.randint(0, most))).encode()
        ids: list[int] = []
        while rest:
            fitting = [token for token, piece in enumerate(self.pieces) if piece and rest.startswith(piece)]
            ids.append(choose.choice(fitting))
            rest = rest.removeprefix(self.pieces[ids[-1]])
        return ids

    def stop_strings(self, *strings: str) -> SearchStopStrings:
        return SearchStopStrings(strings, self.decode, len(self.pieces))


def byte_level(pieces: list[bytes]) -> Vocabulary:
    return Vocabulary(pieces, lambda ids: b"".join(pieces[token] for token in ids).decode(errors="replace"))


def llama_like() -> Vocabulary:
    """As Llama's first tokenizer: a leading space is swallowed; bytes in a row are characters, or none of them is."""
    words = ["a", "b", "aa", "aab", "▁", "▁a", "a▁", "é"]
    single_bytes = [bytes([byte]) for byte in sorted(set(CHARACTERS.encode()) - set(b"ab "))]
    tokens = [*words, *(f"<0x{byte.hex().upper()}>" for byte in single_bytes)]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, tokens[0]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return Vocabulary([*(word.replace("▁", " ").encode() for word in words), *single_bytes], tokenizer.decode)


BYTE_LEVEL = byte_level(PIECES)
LLAMA_LIKE = llama_like()
WHOLE_CHARACTERS = byte_level([*(piece for piece in PIECES if is_text(piece)), "😀".encode()])
every_vocabulary = pytest.mark.parametrize(
    "vocabulary",
    [
        pytest.param(WHOLE_CHARACTERS, id="whole-characters"),
        pytest.param(BYTE_LEVEL, id="byte-level"),
        pytest.param(LLAMA_LIKE, id="llama-like"),
    ],
)


def random_strings(choose: random.Random, text: str) -> tuple[str, ...]:
    """Up to three parts of the text."""
    starts = [choose.randrange(len(text)) for _ in range(choose.randint(1, 3))]
    parts = {text[start : start + choose.randint(1, 6)] for start in starts}
    return tuple(sorted(part for part in parts if INCOMPLETE not in part))


def completes(stop: SearchStopStrings, token: int, prompt: list[int], generated: list[int]) -> bool:
    return stop.is_completed_by(token, stop.end_of(prompt, generated))


def completes_in_ranking(stop: SearchStopStrings, token: int, end: SearchTextEnd) -> bool:
    """Whether it does as the only candidate of a step."""
    return bool(stop.completed(np.zeros((1, 1), int), np.array([[token]]), lambda group, beam: end).item())


def check_every_place(
    stop: SearchStopStrings, decode: Callable[[list[int]], str], prompt: list[int], generated: list[int]
) -> None:
    """Compare with decoding everything and looking for a string that ends where the text had not come before."""
    prompt_text, before = decode(prompt), ""
    for place, token in enumerate(generated):
        after = decode([*prompt, *generated[: place + 1]])[len(prompt_text) :]
        new_ends = range(len(before.rstrip(INCOMPLETE)) + 1, len(after) + 1)
        expected = any(after[:end].endswith(string) for end in new_ends for string in stop.strings)
        assert completes(stop, token, prompt, generated[:place]) == expected, (stop.strings, after)
        end = stop.end_of(prompt, generated[:place])
        assert completes_in_ranking(stop, token, end) == expected, (stop.strings, after)
        before = after


@every_vocabulary
@settings(max_examples=130, derandomize=True)
@given(seeds)
def test_token_completes_what_the_whole_generated_text_says(vocabulary: Vocabulary, seed: int) -> None:
    choose = random.Random(seed)
    prompt, generated = vocabulary.random_ids(choose, 9), vocabulary.random_ids(choose, 24)
    num_strays = choose.choice([0, 0, 1, 5]) if vocabulary is not LLAMA_LIKE else 0  # they spoil all bytes in a row
    for _ in range(num_strays):
        generated.insert(choose.randint(0, len(generated)), choose.randrange(len(vocabulary.pieces)))
    if strings := random_strings(choose, vocabulary.decode(generated) + "\n"):
        check_every_place(vocabulary.stop_strings(*strings), vocabulary.decode, prompt, generated)


@every_vocabulary
@settings(max_examples=70, derandomize=True)
@given(seeds)
def test_string_that_begins_in_the_prompt_is_not_completed(vocabulary: Vocabulary, seed: int) -> None:
    choose = random.Random(seed)
    prompt, generated = vocabulary.random_ids(choose, 9), vocabulary.random_ids(choose, 12)
    length = len(vocabulary.decode(prompt))
    straddling = (vocabulary.decode([*prompt, *generated]) + "\n")[choose.randint(max(length - 3, 0), length) :]
    stop = vocabulary.stop_strings(straddling[: choose.randint(1, 7)])
    check_every_place(stop, vocabulary.decode, prompt, generated)


@pytest.mark.parametrize("rest_of_character", [1, 2, 3])
def test_string_in_a_prompt_that_ends_within_a_character_is_not_completed(rest_of_character: int) -> None:
    ids = [TOKEN[piece] for piece in (b"a", b"\n", b"\xf0", b"\x9f", b"\x98", b"\x80")]
    prompt, generated = ids[:-rest_of_character], ids[-rest_of_character:]
    stop = BYTE_LEVEL.stop_strings("\n")
    for place, token in enumerate(generated):
        assert not completes(stop, token, prompt, generated[:place])


@cache
def trained_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TRAINED_TARGET)


def decode_trained(ids: list[int]) -> str:
    return detokenizing_function(trained_tokenizer(), skip_special_tokens=True)(ids)


def encode_trained(text: str) -> list[int]:
    return trained_tokenizer()(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=50, derandomize=True)
@given(seeds)
def test_trained_tokenizer_completes_what_the_whole_generated_text_says(seed: int) -> None:
    choose = random.Random(seed)
    start = choose.randrange(len(HELD_OUT_TEXT))
    ids = encode_trained(HELD_OUT_TEXT[start : start + choose.randint(2, 99)])
    for _ in range(choose.choice([0, 0, 1, 9])):
        ids.insert(choose.randint(0, len(ids)), choose.randrange(len(trained_tokenizer())))
    cuts = [cut for cut in range(len(ids)) if not decode_trained(ids[:cut]).endswith(INCOMPLETE)]
    cut = choose.choice(cuts)
    prompt, generated = ids[:cut], ids[cut:]
    if strings := random_strings(choose, decode_trained(generated) + "\n"):
        check_every_place(
            SearchStopStrings(strings, decode_trained, len(trained_tokenizer())), decode_trained, prompt, generated
        )


def test_string_within_one_token_is_completed() -> None:
    assert completes(BYTE_LEVEL.stop_strings("a"), TOKEN[b"bab"], [TOKEN[b"b"]], [])


def test_string_is_completed_after_a_part_that_looked_like_its_beginning() -> None:
    stop = BYTE_LEVEL.stop_strings("aab")
    assert completes(stop, TOKEN[b"b"], [], [TOKEN[b"aa"], TOKEN[b"a"]])
    assert not completes(stop, TOKEN[b"b"], [TOKEN[b"a"]], [TOKEN[b"a"]])


def test_any_of_several_strings_is_completed() -> None:
    stop = BYTE_LEVEL.stop_strings("\n", "b a", "aa")
    completing = [piece for piece in PIECES if completes(stop, TOKEN[piece], [], [TOKEN[b"b"], TOKEN[b" "]])]
    assert completing == [b"a", b"aa", b"ab", b"aab", b"a ", b"\n", b"b\na", b"a\xc3"]


def test_most_tokens_are_no_suspects() -> None:
    every_token = np.arange(len(trained_tokenizer()))
    suspects = SearchStopStrings(["\ndef", "\nclass"], decode_trained, len(every_token)).may_complete(every_token)
    assert suspects[encode_trained("\nclass")[-1]]
    assert suspects.sum() < len(every_token) // 4


def test_tokens_are_suspected_in_any_shape_and_judged_once() -> None:
    decoded: list[int] = []

    def decode(ids: list[int]) -> str:
        decoded.extend(ids)
        return BYTE_LEVEL.decode(ids)

    stop = SearchStopStrings(["ab"], decode, len(PIECES))
    ids = np.array([[TOKEN[b"b"], TOKEN[b"a"]], [TOKEN[b"\xa9"], TOKEN[b"b"]]])
    assert stop.may_complete(ids).tolist() == [[True, False], [True, True]]
    assert {*decoded} == {*ids.flatten().tolist()}
    decoded.clear()
    assert stop.may_complete(ids).tolist() == [[True, False], [True, True]]
    assert not decoded


@pytest.mark.parametrize("width", [4, 16])
def test_step_decodes_each_beam_a_few_times_however_many_tokens_complete_a_string(width: int) -> None:
    num_decoded = 0

    def decode(ids: list[int]) -> str:
        nonlocal num_decoded
        num_decoded += 1
        return decode_trained(ids)

    every_token = np.arange(len(trained_tokenizer()))
    stop = SearchStopStrings([" ", "e"], decode, len(every_token))
    suspects = every_token[stop.may_complete(every_token)]
    completing = [token for token in suspects.tolist() if {*" e"} & {*decode_trained([token])}]
    del completing[500:]  # so that few others are ranked at last
    logits = torch.randn(1, width, len(every_token), generator=torch.Generator().manual_seed(0))
    logits[..., completing] += 100
    history, num_judged = encode_trained("def read(self)"), 0

    @cache
    def end_of(group: int, beam: int) -> SearchTextEnd:
        return stop.end_of([], history)

    def judge(parents: np.ndarray, tokens: np.ndarray, _: np.ndarray) -> np.ndarray:
        nonlocal num_judged
        num_judged += tokens.size
        return stop.completed(parents, tokens, end_of)

    inputs = SearchInputs(completes=StopStringConstraint(judge, torch.zeros(0)))
    rules = SearchRules(width, BestStrategy(), StopConstraints((2,), (" ", "e")))
    num_decoded = 0
    step = take_search_step(rules, logits, SearchBeams(-torch.rand(1, width)), inputs)
    assert (step.scores > -math.inf).all()
    assert not {*completing} & {*step.tokens.flatten().tolist()}
    assert width * len(completing) < num_judged < 4 * width * len(completing)
    assert num_decoded < 20 * width


def test_long_hypothesis_is_not_decoded_as_a_whole() -> None:
    lengths: list[int] = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return BYTE_LEVEL.decode(ids)

    stop = SearchStopStrings(["aab"], decode, len(PIECES))
    assert completes(stop, TOKEN[b"b"], 999 * [TOKEN[b" "]], 999 * [TOKEN[b"a"]])
    assert max(lengths) <= CONTEXT + len("aab") + 1


def test_a_candidate_costs_no_more_where_strings_are_many_and_long() -> None:
    ids = encode_trained(HELD_OUT_TEXT[:3000])[:600]
    prompt, generated, candidates = ids[:99], ids[99:], [*range(100, 164)]
    strings = [f"{number:x}" + HELD_OUT_TEXT[number : number + 250] for number in range(16)]
    costs = []
    for some in (["\n\n"], strings):
        lengths: list[int] = []

        def decode(tokens: list[int], lengths: list[int] = lengths) -> str:
            lengths.append(len(tokens))
            return decode_trained(tokens)

        stop = SearchStopStrings(some, decode, len(trained_tokenizer()))
        calls = num_calls(lambda stop=stop: stop.may_complete(np.array(candidates)))
        end, num_decoded = stop.end_of(prompt, generated), sum(lengths)
        lengths.clear()
        calls += num_calls(lambda stop=stop, end=end: [stop.is_completed_by(token, end) for token in candidates])
        costs.append((calls, sum(lengths)))
        assert num_decoded < 8 * (len(candidates) + FIRST_SPAN + max(map(len, some)))
    assert costs[0][0] == pytest.approx(costs[1][0], rel=0.5)
    assert costs[0][1] == costs[1][1] <= len(candidates) * (CONTEXT + 1)
