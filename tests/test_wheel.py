"""The wheel holds the package, and nothing else; a release says where it comes from."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import pytest

import vllm_trie
from tests.support.engine import ROOT

pytestmark = pytest.mark.slow

HOME = "https://forge.example/someone/vllm-trie"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the sdist, and of the wheel that was made of it, as a forge builds them. Nothing is downloaded."""
    folder = tmp_path_factory.mktemp("dist")
    release = {"RELEASE_HOME": HOME, "RELEASE_TAG": "v1.2.3"}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | release, check=True, capture_output=True)
    return folder


def files_under(folder: str) -> set[str]:
    """Of the repository, without what Python leaves there."""
    paths = (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(ROOT)) for path in paths}


def test_a_wheel_made_of_the_sdist_holds_the_package(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = files_under("vllm_trie") | {f"vllm_trie/{name}" for name in files_under("patches")}
    assert names == expected
    assert {"vllm_trie/py.typed", "vllm_trie/worker/attention/shared_prefix.cpp"} < names


def test_the_sdist_holds_no_tests(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        folders = {name.split("/")[1] for name in archive.getnames()}
    assert folders >= {"vllm_trie", "patches", "README.md", "LICENSE", "pyproject.toml"}
    assert not folders & {"tests", "benchmarks", "docs"}


def test_the_metadata_lead_to_the_forge(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = message_from_string(archive.read(name).decode())
    assert metadata["Version"] == vllm_trie.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"Source, {HOME}" in metadata.get_all("Project-URL", [])
    readme = metadata.get_payload()
    assert f"]({HOME}/raw/v1.2.3/docs/design.png)" in readme
    assert f"]({HOME}/blob/v1.2.3/docs/options.md)" in readme
    assert re.findall(r"\]\((?!https:)", readme) == []
