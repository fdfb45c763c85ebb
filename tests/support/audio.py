"""A tiny random Whisper, which hears a second of sound at a time, sounds, and what transformers makes of them."""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTimeStampLogitsProcessor,
    WhisperTokenizer,
)

from tests.support.forks import Fork
from tests.support.reference import Answer

SAMPLING_RATE = 16_000
NUM_AUDIO_TOKENS = 50  # that the encoder makes of a second: two blocks of 32, the second partly filled
SPECIAL = "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|notimestamps|>"
EOS, START, ENGLISH, TRANSLATE, TRANSCRIBE, NO_TIMESTAMPS = range(256, 256 + len(SPECIAL))
FIRST_TIMESTAMP = NO_TIMESTAMPS + 1
PREVIOUS = EOS - 1  # in a whole Whisper
TIMESTAMPS_PER_SECOND = 50
PROMPT = [START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS]


def make_whisper(folder: Path, num_timestamps: int = 1, **generation: Any) -> Path:
    """Save one whose tokens are words, and Whisper's own marks; `generation` is of its generation configuration."""
    marks = [*SPECIAL, *(f"<|{step / TIMESTAMPS_PER_SECOND:.2f}|>" for step in range(num_timestamps))]
    words = {f"Ġw{token}": token for token in range(EOS)}
    if num_timestamps > 1:  # a whole Whisper, which reads what was said before, and has a mark of it
        words |= {letter: words.pop(f"Ġw{token}") for token, letter in enumerate("Ġab")}
        words["<|startofprev|>"] = words.pop(f"Ġw{PREVIOUS}")
        generation["prev_sot_token_id"] = PREVIOUS
    tokenizer = WhisperTokenizer(vocab=words, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": [*marks[1:], *words.keys() & {"<|startofprev|>"}]})
    assert tokenizer.convert_tokens_to_ids(marks) == [*range(EOS, EOS + len(marks))]
    ears = WhisperFeatureExtractor(feature_size=16, sampling_rate=SAMPLING_RATE, chunk_length=1)
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=16,
        d_model=64,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=128,
        max_source_positions=NUM_AUDIO_TOKENS,
        max_target_positions=256,
        init_std=0.3,
        pad_token_id=EOS,
        bos_token_id=EOS,
        eos_token_id=EOS,
        decoder_start_token_id=START,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config)
    torch.manual_seed(28)
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[EOS].normal_(0, 0.6)  # else EOS, as padding, would be nothing
    model.generation_config = GenerationConfig(
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        decoder_start_token_id=START,
        no_timestamps_token_id=NO_TIMESTAMPS,
        is_multilingual=True,
        lang_to_id={"<|en|>": ENGLISH},
        task_to_id={"transcribe": TRANSCRIBE, "translate": TRANSLATE},
        **generation,
    )
    model.save_pretrained(folder)
    WhisperProcessor(ears, tokenizer).save_pretrained(folder)
    return folder


def sound(seed: int, seconds: float = 1.0) -> np.ndarray:
    """[samples] float32, of a few tones and noise."""
    random = np.random.default_rng(seed)
    time = np.arange(int(seconds * SAMPLING_RATE)) / SAMPLING_RATE
    tones = sum(np.sin(2 * np.pi * pitch * time) for pitch in random.uniform(100, 4000, 3))
    return (tones / 4 + random.normal(0, 0.1, len(time))).astype(np.float32)


def recording(seed: int, seconds: float = 1.0) -> tuple[bytes, np.ndarray]:
    """A WAV file, and what is to be heard in it."""
    samples, file = (sound(seed, seconds) / 2 * 32767).astype(np.int16), io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, SAMPLING_RATE, 0, "NONE", ""))
        writer.writeframes(samples.tobytes())
    return file.getvalue(), samples.astype(np.float32) / 32768


def start_hearing(command: Sequence[str], environment: Mapping[str, str], output: IO[str]) -> Fork:
    """Start a server that reads WAV files."""
    return Fork(["-m", "tests.support.hears", *command[1:]], environment, output)


def prompt_of(heard: np.ndarray, decoder_prompt: Sequence[int] = PROMPT) -> dict[str, Any]:
    """To vLLM."""
    encoder_prompt = {"prompt": "", "multi_modal_data": {"audio": (heard, SAMPLING_RATE)}}
    return {"encoder_prompt": encoder_prompt, "decoder_prompt": {"prompt_token_ids": [*decoder_prompt]}}


def transformers_answers(
    model: Path,
    heard: np.ndarray,
    width: int,
    max_tokens: int,
    prompt: Sequence[int] = PROMPT,
    *,
    has_rules_of_timestamps: bool = False,
    **options: Any,
) -> list[Answer]:
    """The `width` best hypotheses of transformers' beam search after the tokens of a prompt; one beam has no score.

    Args:
        has_rules_of_timestamps: Whisper's rules hold, and count tokens from the task on.
    """
    of_all = {"decoder_input_ids": torch.tensor([prompt]), "num_return_sequences": width}
    options |= _search(width, max_tokens)
    if has_rules_of_timestamps:
        first = prompt.index(TRANSCRIBE) + 1
        options["logits_processor"] = [WhisperTimeStampLogitsProcessor(_load(model).generation_config, first)]
        if first < len(prompt):
            options["begin_suppress_tokens"] = []
    output = GenerationMixin.generate(_load(model), _features(model, heard), **of_all, **options)
    return _answers(model, output, len(prompt))


def whispers_answer(
    model: Path, heard: np.ndarray, width: int, max_tokens: int, task: str = "transcribe", **options: Any
) -> Answer:
    """What Whisper's own `generate` makes of it, which sets the first tokens itself, and returns the best alone."""
    num_prompt = len(PROMPT) - bool(options.get("return_timestamps"))
    options |= {**_search(width, max_tokens), "language": "en", "task": task}
    (answer,) = _answers(model, _load(model).generate(_features(model, heard), **options), num_prompt)
    return answer


def _search(width: int, max_tokens: int) -> dict[str, Any]:
    search = {"num_beams": width, "max_new_tokens": max_tokens, "do_sample": False}
    return {**search, "output_scores": True, "return_dict_in_generate": True}


@cache
def _load(model: Path) -> Any:
    return WhisperForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()


def _features(model: Path, heard: np.ndarray) -> torch.Tensor:
    extract = WhisperFeatureExtractor.from_pretrained(model)
    return extract(heard, sampling_rate=SAMPLING_RATE, return_tensors="pt").input_features


def _answers(model: Path, output: Any, num_prompt: int) -> list[Answer]:
    answers, sequences, eos = [], output["sequences"].tolist(), _load(model).generation_config.eos_token_id
    scores = output["sequences_scores"].tolist() if "sequences_scores" in output else [0.0] * len(sequences)
    for tokens, score in zip(sequences, scores, strict=True):
        generated = tokens[num_prompt:]
        end = generated.index(eos) + 1 if eos in generated else len(generated)
        answers.append(Answer(generated[:end], score))
    return answers
