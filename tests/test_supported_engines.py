"""What a generation configuration rules is read as transformers reads it, and only what fits the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs

from tests.support.audio import EOS, NO_TIMESTAMPS, PROMPT, START, TRANSCRIBE, TRANSLATE, make_whisper
from tests.support.engine import TRAINED_TARGET
from vllm_trie.supported_engines import model_decoder_prompt, model_suppressed_tokens, model_timestamp_rules

pytestmark = pytest.mark.slow

TASK = PROMPT[:-1]
CONFIG = {"eos_token_id": EOS, "no_timestamps_token_id": NO_TIMESTAMPS, "max_initial_timestamp_index": 50}
RULES = EOS, NO_TIMESTAMPS, 50


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def model(whisper: Path) -> ModelConfig:
    return EngineArgs(str(whisper)).create_model_config()


@pytest.mark.parametrize(
    ("changes", "prompt", "expected"),
    [
        ({}, TASK, RULES),
        ({"eos_token_id": None, "bos_token_id": EOS}, TASK, RULES),
        ({"max_initial_timestamp_index": None}, TASK, (EOS, NO_TIMESTAMPS, None)),
        ({"task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE}}, TASK, RULES),
        ({"task_to_id": {"transcribe": TRANSCRIBE}}, [START], None),
        ({}, [START], RULES),
        ({}, PROMPT, None),
        ({"no_timestamps_token_id": None}, TASK, None),
        ({"no_timestamps_token_id": NO_TIMESTAMPS + 1}, TASK, None),  # no timestamp follows
        ({"eos_token_id": None}, TASK, None),
        ({"eos_token_id": [EOS, START]}, TASK, None),
        ({"eos_token_id": NO_TIMESTAMPS + 1}, TASK, None),
    ],
)
def test_rules_of_timestamps_need_ids_that_fit_the_model_and_a_prompt_that_asks(
    model: ModelConfig, changes: dict[str, Any], prompt: list[int], expected: Any
) -> None:
    assert model_timestamp_rules(model, CONFIG | changes, prompt) == expected


PREVIOUS = 7


@pytest.mark.parametrize(
    ("previous", "prompt", "expected"),
    [
        (PREVIOUS, [START, PREVIOUS, 5, *TASK], [PREVIOUS, 5, *TASK]),
        (PREVIOUS, [PREVIOUS, 5, *TASK], [PREVIOUS, 5, *TASK]),
        (PREVIOUS, TASK, TASK),
        (PREVIOUS, [START], [START]),
        (None, [START, PREVIOUS, 5, *TASK], [START, PREVIOUS, 5, *TASK]),
    ],
)
def test_no_start_token_precedes_what_was_said_before(
    model: ModelConfig, previous: int | None, prompt: list[int], expected: list[int]
) -> None:
    assert model_decoder_prompt(model, {"prev_sot_token_id": previous}, prompt) == expected


def test_nothing_is_ruled_where_vllms_own_defaults_are_asked_for_nor_without_an_encoder(
    whisper: Path, model: ModelConfig
) -> None:
    config = CONFIG | {"suppress_tokens": [3, 10**6], "begin_suppress_tokens": [EOS]}
    assert model_suppressed_tokens(model, config) == ([3], [EOS])
    for other in (EngineArgs(str(whisper), generation_config="vllm"), EngineArgs(str(TRAINED_TARGET))):
        unruled = other.create_model_config()
        assert model_suppressed_tokens(unruled, config) is None
        assert model_timestamp_rules(unruled, config, TASK) is None
        said_before = [START, PREVIOUS, 5, *TASK]
        assert model_decoder_prompt(unruled, {"prev_sot_token_id": PREVIOUS}, said_before) == said_before
