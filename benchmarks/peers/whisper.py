"""Whisper in transformers and in CTranslate2: features, encoder, and search after a prompt of the decoder.

Both leave out what the model's generation configuration suppresses, as searches in the engine do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.peers.ctranslate2 import COMPUTE_TYPE, threads
from benchmarks.whisper_base import get
from benchmarks.whisper_base.speech import RATE


class Hypothesis(NamedTuple):
    """Tokens after the prompt, up to the one that ends them, and the mean of their log-probabilities."""

    token_ids: list[int]
    score: float


class WhisperInTransformers:
    """A Whisper in transformers, searched by the `generate` that all models have: Whisper's returns the best alone.

    Args:
        model: Folder of the model.
        dtype: Of its weights.
    """

    def __init__(self, model: str, dtype: str) -> None:
        import torch
        from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, logging

        logging.set_verbosity_error()
        self._model = WhisperForConditionalGeneration.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self._extractor = WhisperFeatureExtractor.from_pretrained(model)
        self._end = self._model.generation_config.eos_token_id

    def features(self, sounds: Sequence[np.ndarray]) -> Any:
        """[sounds, mel bands, 3000]"""
        found = self._extractor(list(sounds), sampling_rate=RATE, return_tensors="pt").input_features
        return found.to(self._model.dtype)

    def encode(self, features: Any) -> Any:
        """[sounds, 1500, width of the model]"""
        import torch

        with torch.inference_mode():
            return self._model.get_encoder()(features).last_hidden_state

    def search(
        self, encoded: Any, prompts: Sequence[Sequence[int]], width: int, num_tokens: int, n: int = 1
    ) -> list[list[Hypothesis]]:
        """The n best hypotheses of each sound, best first, of at most `num_tokens` tokens.

        One beam is greedy search, whose scores are 0.

        Args:
            encoded: By `encode`.
            prompts: Equally long. After a timestamp, the rules of timestamps hold; it is the first token for them.
            width: Beams.
            num_tokens: The most of a hypothesis.
            n: Hypotheses of each sound.
        """
        import torch
        from transformers import GenerationMixin, WhisperTimeStampLogitsProcessor
        from transformers.modeling_outputs import BaseModelOutput

        ids, config, rules = torch.tensor(prompts), self._model.generation_config, dict[str, Any]()
        if prompts[0][-1] > config.no_timestamps_token_id:
            processor = WhisperTimeStampLogitsProcessor(config, begin_index=ids.shape[1] - 1)
            rules = {"logits_processor": [processor], "begin_suppress_tokens": []}
        with torch.inference_mode():
            found = GenerationMixin.generate(
                self._model,
                encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
                decoder_input_ids=ids,
                num_beams=width,
                num_return_sequences=n,
                max_new_tokens=num_tokens,
                do_sample=False,
                output_scores=width > 1,
                return_dict_in_generate=True,
                **rules,
            )
        answers = [self._until_end(tokens) for tokens in found.sequences[:, ids.shape[1] :].tolist()]
        scores = found.sequences_scores.tolist() if width > 1 else [0.0] * len(answers)
        hypotheses = list(map(Hypothesis, answers, scores))
        return [hypotheses[start : start + n] for start in range(0, len(hypotheses), n)]

    def _until_end(self, tokens: list[int]) -> list[int]:
        return tokens[: tokens.index(self._end) + 1] if self._end in tokens else tokens


class WhisperInCTranslate2:
    """A Whisper in CTranslate2, whose features are transformers'.

    Args:
        model: Folder of the model for transformers, in which is that for CTranslate2.

    Raises:
        ValueError: CTranslate2 is not installed, or the folder has no form for it.
    """

    def __init__(self, model: str) -> None:
        try:
            import ctranslate2
        except ImportError as error:
            raise ValueError("CTranslate2 is not installed (pip install ctranslate2)") from error
        from transformers import WhisperFeatureExtractor

        folder = Path(model) / get.OF_CTRANSLATE2
        if not folder.is_dir():
            raise ValueError(f"{model} has no form for CTranslate2")
        self._tensor = ctranslate2.StorageView.from_array
        self._extractor = WhisperFeatureExtractor.from_pretrained(model)
        self._model = ctranslate2.models.Whisper(
            str(folder), device="cpu", compute_type=COMPUTE_TYPE, inter_threads=1, intra_threads=threads()
        )

    def features(self, sounds: Sequence[np.ndarray]) -> Any:
        """[sounds, mel bands, 3000]"""
        return self._tensor(self._extractor(list(sounds), sampling_rate=RATE, return_tensors="np").input_features)

    def encode(self, features: Any) -> Any:
        """[sounds, 1500, width of the model]"""
        return self._model.encode(features)

    def search(
        self, encoded: Any, prompts: Sequence[Sequence[int]], width: int, num_tokens: int
    ) -> list[list[Hypothesis]]:
        """The best hypothesis of each sound, of at most `num_tokens` tokens; one beam is greedy search."""
        found = self._model.generate(
            encoded,
            [list(prompt) for prompt in prompts],
            beam_size=width,
            max_length=2 * num_tokens,  # of which at most half follow the prompt
            return_scores=True,
        )
        return [[Hypothesis(one.sequences_ids[0], one.scores[0])] for one in found]
