"""What a search may ask for, with what a model rules: Whisper's suppressed tokens, and its rules of timestamps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from vllm.sampling_params import StructuredOutputsParams

from tests.behaviour.search.test_feature_pairs import FEATURES, MAX_TOKENS, WIDTH, Found, ask, found_in, names_an_option
from tests.support.audio import (
    ENGLISH,
    EOS,
    FIRST_TIMESTAMP,
    START,
    TIMESTAMPS_PER_SECOND,
    TRANSCRIBE,
    make_whisper,
    prompt_of,
    sound,
)
from tests.support.engine import Engine, Engines
from tests.support.items import random_items

pytestmark = pytest.mark.slow

SUPPRESSED, LATEST_FIRST = [184, 188], 5
TASK = [START, ENGLISH, TRANSCRIBE]
WITHOUT_RULES = {'semantics="vllm"', 'semantics="tridecode"'}
TEXT_ALONE = {"allowed_token_ids", "allowed_sequences", "catalog_unique", "structured_outputs"}
REFUSED = {'speculation="exact"', 'speculation="sample"', "memory_mode", 'accept="top_k"', "contrast", 'unit="step"'}
ITEMS = [[*item] for item in random_items(300, [3, 4], tokens=(2, EOS))]
OWN = {  # with tokens of this model
    "allowed_token_ids": {"allowed_token_ids": [*range(EOS + 1)]},
    "allowed_sequences": {"allowed_sequences": ITEMS},
    "catalog_unique": FEATURES["catalog_unique"] | {"allowed_sequences": ITEMS, "stop_token_ids": [EOS - 1]},
    "structured_outputs": {"structured_outputs": StructuredOutputsParams(regex="( w[0-9]+)+")},
}


@pytest.fixture
def engine(engines: Engines, tmp_path: Path) -> Engine:
    ruled = {"suppress_tokens": SUPPRESSED, "begin_suppress_tokens": [EOS], "max_initial_timestamp_index": LATEST_FIRST}
    model = make_whisper(tmp_path, TIMESTAMPS_PER_SECOND + 1, **ruled)
    return engines(model, max_model_len=128, max_num_batched_tokens=256)


def suppresses(found: Found) -> bool:
    """Whether a hypothesis has no suppressed token, nor EOS as its first one."""
    return not {*SUPPRESSED} & {*found.tokens} and found.tokens[0] != EOS


def is_stamped(found: Found) -> bool:
    """Whether timestamps are in pairs around what is said, never decrease, and begin early."""
    stamps = [token for token in found.tokens if token >= FIRST_TIMESTAMP]
    marks = "".join("t" if token in stamps else "x" if token < EOS else "s" for token in found.tokens)
    is_paired = not re.search("^[xs]|^tt|ttt|[xs]tx", marks)  # after special tokens there may be text
    return is_paired and stamps == sorted(stamps) and stamps[0] <= FIRST_TIMESTAMP + LATEST_FIRST


def test_each_feature_keeps_to_what_the_model_rules_or_is_refused_in_a_sentence(engine: Engine) -> None:
    jobs = {
        name: {"n": WIDTH, "beam_width": WIDTH, "max_tokens": MAX_TOKENS, **options}
        for name, options in {"plain": {}, **FEATURES, **OWN}.items()
    }
    prompt = prompt_of(sound(0), TASK)
    answers, refused = ask(engine, jobs, prompt=prompt)
    assert refused.keys() == REFUSED
    assert all(names_an_option(name, why) for name, why in refused.items())
    assert answers.keys() == jobs.keys() - REFUSED
    for name, output in answers.items():
        found = found_in(output)
        assert output.finished, name
        assert len(found) == (1 if name == "output_kind=DELTA" else WIDTH), name
        assert {one.finish_reason for one in found} <= {"stop", "length"}, name
        if name in WITHOUT_RULES:
            assert not all(map(suppresses, found)), name
            assert not any(map(is_stamped, found)), name
            continue
        assert all(map(suppresses, found)), name
        if name in TEXT_ALONE:
            assert all(token <= EOS for one in found for token in one.tokens), name
        else:
            assert all(map(is_stamped, found)), name
    again, _ = ask(engine, {"plain": jobs["plain"]}, prompt=prompt)
    assert found_in(again["plain"]) == found_in(answers["plain"])
