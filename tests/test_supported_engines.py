"""What a generation configuration rules is read as transformers reads it, and only what fits the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs

from tests.support.audio import EOS, make_whisper
from tests.support.engine import TRAINED_TARGET
from vllm_trie.supported_engines import model_suppressed_tokens

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def model(whisper: Path) -> ModelConfig:
    return EngineArgs(str(whisper)).create_model_config()


def test_nothing_is_ruled_where_vllms_own_defaults_are_asked_for_nor_without_an_encoder(
    whisper: Path, model: ModelConfig
) -> None:
    config = {"suppress_tokens": [3, 10**6], "begin_suppress_tokens": [EOS]}
    assert model_suppressed_tokens(model, config) == ([3], [EOS])
    for other in (EngineArgs(str(whisper), generation_config="vllm"), EngineArgs(str(TRAINED_TARGET))):
        unruled = other.create_model_config()
        assert model_suppressed_tokens(unruled, config) is None
