"""Speech whose words are known: sentences of our own, in several languages, said by espeak-ng.

espeak-ng is a program (Debian: `apt-get install espeak-ng`). Each clip has its own voice, speed and pitch: slow ones,
and no women's voices, of which Whisper base understands less.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import wave
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import jiwer
import numpy as np
from scipy.signal import resample_poly

SPEAKER = "espeak-ng"
RATE = 16_000  # samples a second, as Whisper hears
VARIANTS = ("", "+m3", "+m1", "+m6", "+m7")
SPEEDS = (105, 115, 125)  # words a minute
PITCHES = (35, 45, 55)  # of 0 to 99

SENTENCES = {
    "en": (
        "The ferry leaves the island at seven, and the last bus waits for it.",
        "Please put the blue folder on the second shelf, next to the window.",
        "She planted three apple trees behind the old stone wall.",
        "Our meeting moves to Thursday because the room is being painted.",
        "A small library opened in the railway station last winter.",
        "He forgot his umbrella, but the rain had stopped by noon.",
        "The recipe asks for two eggs, a cup of milk and a little salt.",
        "Nobody noticed the clock until it struck twelve.",
        "The report explains how the bridge was repaired in only nine days.",
        "Turn left at the bakery and walk on until you see the river.",
        "Children from the village learned to sail on the quiet lake.",
        "If the engine gets too hot, stop the car and wait ten minutes.",
    ),
    "de": (
        "Der Zug nach Hamburg hat heute eine halbe Stunde Verspätung.",
        "Bitte stellen Sie die Flaschen in den Keller.",
        "Im Garten hinter dem Haus blühen schon die ersten Rosen.",
        "Am Montag beginnt der neue Kurs um neun Uhr.",
        "Die Kinder spielen am Fluss, bis es dunkel wird.",
        "Wir haben drei Karten für das Konzert gekauft.",
        "Mein Bruder arbeitet seit zwei Jahren in einer Bäckerei.",
    ),
    "fr": (
        "Le marché ouvre tous les matins devant la vieille église.",
        "Nous avons trouvé une petite maison près de la mer.",
        "Elle écrit une longue lettre à sa soeur.",
        "Le train part à huit heures et arrive avant midi.",
        "Il faut prendre la deuxième rue à gauche.",
        "Les enfants jouent dans le jardin avec le chien.",
        "Mon père prépare le repas pour toute la famille.",
    ),
    "es": (
        "La biblioteca cierra a las ocho de la tarde.",
        "Mi hermana trabaja en un hospital cerca de la playa.",
        "El tren llega con veinte minutos de retraso.",
        "Compramos pan, queso y tres botellas de agua.",
        "Los niños juegan en la plaza después de la escuela.",
        "El médico dice que debo caminar cada mañana.",
        "Hay una farmacia al lado del mercado.",
    ),
    "it": (
        "Il museo apre alle dieci e chiude alle sei.",
        "Mia nonna prepara la pasta ogni domenica.",
        "Il treno per Milano parte dal terzo binario.",
        "Abbiamo visto una bella casa vicino al lago.",
        "I bambini leggono un libro nel giardino.",
        "Vorrei due biglietti per il concerto di sabato.",
        "La strada è chiusa fino a lunedì mattina.",
    ),
}


class Clip(NamedTuple):
    """A recording [samples] float32 at `RATE`, from -1 to 1 but for peaks a little beyond, of a text in a language."""

    sound: np.ndarray
    text: str
    language: str


def speaker_is_here() -> bool:
    """Whether espeak-ng is installed."""
    return shutil.which(SPEAKER) is not None


@cache
def say(text: str, language: str, number: int = 0) -> np.ndarray:
    """[samples] float32, a text said in a language; `number` chooses voice, speed and pitch."""
    voice = f"{language}{VARIANTS[number % len(VARIANTS)]}"
    speed, pitch = SPEEDS[number % len(SPEEDS)], PITCHES[number // 2 % len(PITCHES)]
    command = [SPEAKER, "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", text]
    with wave.open(io.BytesIO(subprocess.run(command, check=True, capture_output=True).stdout)) as file:
        rate, samples = file.getframerate(), np.frombuffer(file.readframes(1 << 30), "<i2")
    return resample_poly(samples / 32768, RATE, rate).astype(np.float32)


def clips(count: int) -> list[Clip]:
    """Clips of 2 to 14 s, of one sentence or two, no two alike; languages take turns, English twice as often."""
    turns, said, found = ("en", "de", "fr", "en", "es", "it"), Counter[str](), list[Clip]()
    for number in range(count):
        language = turns[number % len(turns)]
        sentences, at = SENTENCES[language], said[language]
        text = " ".join(sentences[(at + further) % len(sentences)] for further in range(1 + number % 2))
        found.append(Clip(say(text, language, at + at // len(sentences)), text, language))
        said[language] += 1
    return found


def recording(language: str = "en", times: int = 1) -> Clip:
    """All sentences of a language, one after the other, as many times as asked for: of English a minute each time."""
    sentences = [*SENTENCES[language]] * times
    pause = np.zeros(RATE // 2, np.float32)
    parts = [part for number, text in enumerate(sentences) for part in (say(text, language, number), pause)]
    return Clip(np.concatenate(parts), " ".join(sentences), language)


def as_wav(sound: np.ndarray) -> bytes:
    """A recording as a file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes((sound.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


def word_error_rate(texts: Sequence[str], references: Sequence[str]) -> float:
    """Words that are wrong, left out or added, over those of the references; neither case nor punctuation counts."""
    plain = jiwer.Compose([jiwer.ToLowerCase(), jiwer.RemovePunctuation(), jiwer.ReduceToListOfListOfWords()])
    return jiwer.wer([*references], [*texts], reference_transform=plain, hypothesis_transform=plain)
