"""A tiny random Whisper, which hears a second of sound at a time, sounds, and what transformers makes of them."""

from __future__ import annotations

import io
import wave
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

from tests.support.reference import Answer

SAMPLING_RATE = 16_000
NUM_AUDIO_TOKENS = 50  # that the encoder makes of a second: two blocks of 32, the second partly filled
SPECIAL = [
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|notimestamps|>"),
    "<|0.00|>",  # the first of the timestamps
]
EOS, START, ENGLISH, TRANSLATE, TRANSCRIBE, NO_TIMESTAMPS, FIRST_TIMESTAMP = range(256, 256 + len(SPECIAL))
PROMPT = [START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS]


def make_whisper(folder: Path) -> Path:
    """Save one whose tokens are words, and Whisper's own marks."""
    tokenizer = WhisperTokenizer(vocab={f"Ġw{token}": token for token in range(EOS)}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    assert tokenizer.convert_tokens_to_ids(SPECIAL) == [*range(EOS, FIRST_TIMESTAMP + 1)]
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


def prompt_of(heard: np.ndarray) -> dict[str, Any]:
    """To vLLM."""
    encoder_prompt = {"prompt": "", "multi_modal_data": {"audio": (heard, SAMPLING_RATE)}}
    return {"encoder_prompt": encoder_prompt, "decoder_prompt": {"prompt_token_ids": PROMPT}}


def transformers_answers(model: Path, heard: np.ndarray, width: int, max_tokens: int, **options: Any) -> list[Answer]:
    """The `width` best hypotheses of transformers' beam search, behind the tokens of `PROMPT`."""
    prompt = torch.tensor([PROMPT])
    of_all = {"decoder_input_ids": prompt, "num_return_sequences": width}
    options |= _search(width, max_tokens)
    return _answers(GenerationMixin.generate(_load(model), _features(model, heard), **of_all, **options))


def whispers_answer(
    model: Path, heard: np.ndarray, width: int, max_tokens: int, task: str = "transcribe", **options: Any
) -> Answer:
    """What Whisper's own `generate` makes of it, which sets the first tokens itself, and returns the best alone."""
    options |= {**_search(width, max_tokens), "language": "en", "task": task}
    (answer,) = _answers(_load(model).generate(_features(model, heard), **options))
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


def _answers(output: Any) -> list[Answer]:
    answers = []
    for tokens, score in zip(output["sequences"].tolist(), output["sequences_scores"].tolist(), strict=True):
        assert tokens[:2] == PROMPT[:2]
        generated = tokens[len(PROMPT) :]
        end = generated.index(EOS) + 1 if EOS in generated else len(generated)
        answers.append(Answer(generated[:end], score))
    return answers
