"""Texts of hypotheses are those of vLLM's detokenizer to the byte, though what several begin with is decoded once."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from tests.entrypoints.answers.test_answer_start import (
    TEXT,
    cuts_within_characters,
    detokenizer,
    of_sentence_pieces,
    tokenizer,
)
from tests.entrypoints.answers.test_search_state import state_of
from vllm_trie.entrypoints.answers.hypothesis_texts import (
    HypothesisTexts,
    can_share_hypothesis_texts,
    num_shared_text_tokens,
)
from vllm_trie.entrypoints.answers.search_state import AnswerState
from vllm_trie.messages import HYPOTHESES, SentHypotheses


def texts_of(hypotheses: list[list[int]], stopped: list[bool], prompt: list[int], of: Any, **options: Any) -> list[str]:
    detok = detokenizer(prompt, of=of, **options)
    assert can_share_hypothesis_texts(detok)
    texts = HypothesisTexts(detok, [*chain.from_iterable(hypotheses)], [*map(len, hypotheses)])
    return [texts.text(n, *one) for n, one in enumerate(zip(hypotheses, stopped, strict=True))]


def alone(tokens: list[int], has_stopped: bool, prompt: list[int], of: Any, **options: Any) -> str:
    detok = detokenizer(prompt, of=of, **options)
    detok.update(tokens, has_stopped)
    return detok.get_next_output_text(True, False)


@settings(max_examples=100, derandomize=True)
@given(st.data(), st.booleans(), st.booleans(), st.booleans())
def test_each_text_is_that_of_a_hypothesis_alone(
    data: st.DataObject, is_of_pieces: bool, skips: bool, includes_stops: bool
) -> None:
    of = of_sentence_pieces() if is_of_pieces else tokenizer()
    halves = [] if is_of_pieces else [token for cut in cuts_within_characters() for token in (cut[0][-1], cut[1][0])]
    choices = data.draw(st.lists(st.sampled_from([*range(len(of)), *halves]), min_size=1, max_size=4))
    some = st.lists(st.sampled_from(choices), max_size=6)
    prompt, hypotheses = data.draw(some), data.draw(st.lists(some, min_size=1, max_size=8))
    stopped = data.draw(st.lists(st.booleans(), min_size=len(hypotheses), max_size=len(hypotheses)))
    options = {"skip_special_tokens": skips, "include_stop_str_in_output": includes_stops}
    expected = [alone(*one, prompt, of, **options) for one in zip(hypotheses, stopped, strict=True)]
    assert texts_of(hypotheses, stopped, prompt, of, **options) == expected


def test_hypotheses_go_on_with_the_character_that_their_prompt_leaves_open() -> None:
    for prompt, generated in cuts_within_characters():
        hypotheses = [generated[:8], generated[:4], [*generated[:4], *generated[:4]], generated[:1]]
        stopped = [False, True, False, False]
        expected = [alone(*one, prompt, tokenizer()) for one in zip(hypotheses, stopped, strict=True)]
        assert texts_of(hypotheses, stopped, prompt, tokenizer()) == expected


def test_what_several_begin_with_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, original = list[int](), FastIncrementalDetokenizer.decode_next

    def counted(self: FastIncrementalDetokenizer, token: int) -> str:
        decoded.append(token)
        return original(self, token)

    monkeypatch.setattr(FastIncrementalDetokenizer, "decode_next", counted)
    prefix = tokenizer().encode(TEXT, add_special_tokens=False)
    texts_of([[*prefix, last] for last in range(50, 70)], 20 * [False], prefix, None)
    assert decoded == [*prefix, *range(50, 70)]


def test_of_each_the_longest_prefix_that_another_one_begins_with_is_found() -> None:
    hypotheses = [[1, 2, 3], [5, 0], [1, 2, 4, 9], [7], [1, 2], [], [5, 0, 0], [1, 8]]
    assert num_shared_text_tokens([*chain.from_iterable(hypotheses)], [*map(len, hypotheses)]) == [
        2,
        1,
        2,
        0,
        1,
        0,
        2,
        1,
    ]
    assert num_shared_text_tokens([], []) == []
    assert num_shared_text_tokens([], [0, 0]) == [0, 0]
    assert num_shared_text_tokens([4, 5], [2]) == [0]


def test_vllm_makes_texts_that_depend_on_more() -> None:
    assert not can_share_hypothesis_texts(detokenizer([5], stop=["x"]))
    assert not can_share_hypothesis_texts(
        detokenizer([5], spaces_between_special_tokens=False, skip_special_tokens=False)
    )


def test_vllm_makes_texts_where_streams_cannot_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfFastokens:
        def __init__(self, **_: Any) -> None:
            """As `tokenizers` makes one."""

        def __reduce__(self) -> Any:
            raise TypeError("cannot pickle 'builtins.DecodeStream' object")

    monkeypatch.setattr(decoders, "DecodeStream", OfFastokens)
    assert not can_share_hypothesis_texts(detokenizer([5]))
    assert not can_share_hypothesis_texts(detokenizer(cuts_within_characters()[0][0]))


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
@pytest.mark.parametrize("are_aborted", [False, True])
@pytest.mark.parametrize("of", [tokenizer(), None])
def test_outputs_are_what_vllm_makes_of_each_hypothesis(
    kind: RequestOutputKind, are_aborted: bool, of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = tokenizer().encode(TEXT, add_special_tokens=False)[:9]
    hypotheses = [[*begin[: 3 + n % 4], n, n // 2] for n in range(40)]
    stops = [[None, n % 3][n % 2] for n in range(40)]
    sent = SentHypotheses([*map(len, hypotheses)], [n % 2 for n in range(40)], stops, [-float(n) for n in range(40)])
    sent = sent._replace(are_aborted=are_aborted)

    def outputs() -> list[CompletionOutput]:
        state = state_of(42, of, output_kind=kind)
        state._kept.output = EngineCoreOutput("r-1", [*chain.from_iterable(hypotheses)])
        answer = {"trie_beam": {HYPOTHESES: sent}}
        found = state.make_request_output([], None, FinishReason.STOP, None, answer)
        assert found is not None
        return found.outputs

    made = outputs()
    monkeypatch.setattr(AnswerState, "_texts", lambda *_: None)
    assert made == outputs()
    assert [one.token_ids for one in made] == [*hypotheses, [], []]
