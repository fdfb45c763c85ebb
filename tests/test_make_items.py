"""Semantic ids that examples/retrieve/make_items.py makes, and the catalog that is built from them."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.retrieve.make_items import SAMPLE, semantic_ids
from tests.support.engine import ROOT
from vllm_trie.catalog import Catalog
from vllm_trie.catalog import __main__ as catalog_command

SCRIPT = ROOT / "examples" / "retrieve" / "make_items.py"


def make(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_items_differ_and_each_level_has_tokens_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines, built = tmp_path / "items.jsonl", tmp_path / "items.catalog"
    make(monkeypatch, lines, "--items", 500, "--levels", 3, "--codes", 16, "--first-token", 7)
    items = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [item["id"] for item in items] == [*range(500)]
    tokens = np.array([item["tokens"] for item in items])
    assert len(np.unique(tokens, axis=0)) == 500
    assert ((tokens - 7) // 16 == np.arange(3)).all()
    monkeypatch.setattr(sys, "argv", ["catalog", "build", str(lines), str(built), "--vocab-size", "55"])
    catalog_command.main()
    catalog = Catalog.open(built)
    assert (catalog.num_items, catalog.shortest, catalog.longest) == (500, 3, 3)
    assert catalog.find(tokens[:20]).tolist() == [*range(20)]


def test_the_same_seed_makes_the_same_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make(monkeypatch, tmp_path / name, "--items", 50, "--codes", 8, "--seed", seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_items_that_are_alike_begin_alike() -> None:
    random = np.random.default_rng(0)
    centres = np.float32([[0, 0], [10, 0], [0, 10], [10, 10]])
    of_items = np.arange(4 * SAMPLE) % 4
    vectors = centres[of_items] + 0.1 * random.standard_normal((len(of_items), 2), np.float32)
    codes = semantic_ids(vectors, 3, 256, random)
    distances = codes[:, None, 0] == codes[None, :, 0]
    assert not distances[of_items[:, None] != of_items[None, :]].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("items.jsonl", "--items", "100", "--levels", "1", "--codes", "99"), "100 items have all codes but the last"),
        (("nowhere/items.jsonl", "--items", "10"), "No such file or directory"),
        (("items.jsonl", "--items", "0"), "'0' is not a number above 0"),
    ],
)
def test_what_cannot_be_made_ends_in_a_sentence(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        make(monkeypatch, *arguments)
    assert message in f"{ended.value}{capsys.readouterr().err}"
