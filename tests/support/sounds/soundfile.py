"""Reads WAV files as the package of this name does, which vLLM asks for uploads, and which need not be installed.

`tests/support/hears.py` puts it in the place of that package.
"""

from __future__ import annotations

import wave
from typing import Any

import numpy as np


class SoundFile:
    """One file of 16-bit samples, mono."""

    def __init__(self, file: Any) -> None:
        with wave.open(file) as reader:
            self.channels, width, self.samplerate, self.frames, *_ = reader.getparams()
            assert (self.channels, width) == (1, 2)
            self._samples = reader.readframes(self.frames)

    def __enter__(self) -> SoundFile:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def read(self, dtype: str, always_2d: bool) -> np.ndarray:
        """[frames] float32 from -1 to 1."""
        return np.frombuffer(self._samples, np.int16).astype(np.float32) / 32768


class LibsndfileError(Exception):
    """Which it never raises."""
