"""Clips whose words are known, how answers are compared, and the tables of speech on their smallest setting."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.harness import Setting
from benchmarks.peers.whisper import Hypothesis
from benchmarks.tables import hearing, speech, speech_parts, word_errors
from benchmarks.whisper_base import get
from benchmarks.whisper_base.speech import RATE, SPEAKER, as_wav, clips, speaker_is_here, word_error_rate
from tests.support.audio import prompt_of, whispers_answer
from tests.support.engine import Engines
from tests.support.reference import agree, engine_answers
from vllm_trie import beam_params

needs_speaker = pytest.mark.skipif(not speaker_is_here(), reason=f"{SPEAKER} is not installed")


@needs_speaker
def test_clips_are_distinct_and_last_seconds() -> None:
    spoken = clips(60)
    assert len({clip.sound.tobytes() for clip in spoken}) == len(spoken)
    assert {clip.language for clip in spoken[:6]} == {*hearing.LANGUAGES}
    for clip in spoken:
        assert 1.5 * RATE <= len(clip.sound) <= 15 * RATE
        assert clip.sound.dtype == np.float32
        assert 0.1 < np.abs(clip.sound).max() < 1.2


@needs_speaker
def test_the_first_clips_do_not_depend_on_how_many_there_are() -> None:
    for one, other in zip(clips(3), clips(9), strict=False):
        assert one.text == other.text
        assert np.array_equal(one.sound, other.sound)


def test_a_file_of_a_sound_cuts_peaks_off() -> None:
    samples = np.frombuffer(as_wav(np.array([0.5, 1.1, -1.1], np.float32))[-6:], "<i2")
    assert samples.tolist() == [16383, 32767, -32767]


def test_word_error_rate_counts_words_but_no_case_and_no_punctuation() -> None:
    assert word_error_rate(["The FERRY leaves!"], ["the ferry leaves"]) == 0
    assert word_error_rate(["The ferry stays", "at noon"], ["The ferry leaves", "at noon"]) == pytest.approx(1 / 5)
    assert word_error_rate([""], ["at noon"]) == 1


def test_hypotheses_are_compared_rank_by_rank() -> None:
    theirs = [[Hypothesis([1, 2], -0.1), Hypothesis([1, 3], -0.2), Hypothesis([4], -0.20001), Hypothesis([5], -0.3)]]
    ours = [[theirs[0][0], theirs[0][2], theirs[0][1], Hypothesis([6], -0.4)]]
    *counts, most = hearing.compared(ours, theirs)
    assert (counts, most) == ([4, 1, 2, 1], pytest.approx(0.1))


def test_models_that_do_not_hear_have_no_tables_of_speech(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--size", "minimal", "--only", "speech", "hearing", "--out", str(tmp_path)]) == 0
    assert "speech is left out: it needs --model whisper-base" in capsys.readouterr().out
    assert not Setting().hears


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.usefixtures("speech_model")
@needs_speaker
def test_speech_is_measured_beside_its_peers_and_hears_what_transformers_hears(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.close()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    tables = ["speech", "speech_parts", "hearing", "word_errors"]
    options = ["--model", get.NAME, "--size", "minimal", "--repeats", "1", "--out", str(tmp_path)]
    assert main([*options, "--only", *tables]) == 0
    of_table = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in tables}
    rows = {
        name: [dict(zip(content["columns"], row, strict=True)) for cell in content["cells"] for row in cell["rows"]]
        for name, content in of_table.items()
    }
    searches = {speech.OURS, speech.CTRANSLATE2, speech.TRANSFORMERS}
    assert {row["search"] for row in rows["speech"]} == {*searches, speech.CLIENT_LOOP}
    assert {row["search"] for row in rows["speech_parts"]} == {*searches, speech_parts.SHARED}
    for row in rows["speech_parts"]:
        parts = row["features"] + row["encoder"] + row["decoder"]
        assert 0 < parts <= row["whole"]
    for row in rows["hearing"]:
        assert row["identical"] + row["near-ties"] == row["hypotheses"]
        assert row["max |Δ score|"] < 1e-4
    assert {row["number format"] for row in rows["word_errors"]} == {*word_errors.DTYPES}
    for row in rows["word_errors"]:
        in_float32 = row["number format"] == "float32" and row["search"] == word_errors.BY_THEIR_RULES
        if in_float32 or row["search"] == speech.CTRANSLATE2:
            assert row["answers as CTranslate2's"] == row["clips"]


@pytest.mark.slow
@pytest.mark.nightly
@needs_speaker
def test_timestamps_of_speech_are_those_of_whispers_own_generate(engines: Engines, speech_model: Path) -> None:
    engine = engines(speech_model, max_model_len=256, max_num_batched_tokens=2048)
    marks = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|0.00|>"]
    *task, first = engine.llm.get_tokenizer().convert_tokens_to_ids(marks)
    sound, width, max_tokens = clips(1)[0].sound, 5, 64
    params = beam_params(width, n=width, max_tokens=max_tokens)
    (output,) = engine.llm.generate([prompt_of(sound, task)], params, use_tqdm=False)
    asked = {"return_timestamps": True, "force_unique_generate_call": True}
    expected = whispers_answer(speech_model, sound, width, max_tokens, **asked)
    assert agree(engine_answers(output, 1.0)[:1], [expected])
    timestamps = [token for token in output.outputs[0].token_ids if token >= first]
    assert timestamps[0] == first
    assert len(timestamps) % 2 == 0
    assert timestamps == sorted(timestamps)
