"""Items are read from JSON lines and from text, and a line that is none is named."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.support.engine import TRAINED_TARGET
from vllm_trie.catalog import lines
from vllm_trie.catalog.items import CatalogItems
from vllm_trie.catalog.lines import read_catalog_items
from vllm_trie.catalog.tokenizer import load_catalog_tokenizer, tokenizer_digest


def read(path: Path, *rows: str | bytes, **options: object) -> CatalogItems:
    path.write_bytes(b"".join((row if isinstance(row, bytes) else row.encode()) + b"\n" for row in rows))
    return read_catalog_items(
        path, **{"tokenizer": None, "vocab_size": None, "progress": lambda _: None, "warn": lambda _: None, **options}
    )


def sequences(items: CatalogItems) -> list[list[int]]:
    return [part.tolist() for part in np.split(items.tokens, items.lengths.cumsum()[:-1])]


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return load_catalog_tokenizer(str(TRAINED_TARGET))


def test_lines_are_lists_texts_and_objects(tmp_path: Path, tokenizer: object) -> None:
    rows = ["[1, 2]", '"def main"', '{"tokens": [3], "id": 70, "title": "x"}', "", '{"text": " self"}', "[1,2]\r"]
    items = read(tmp_path / "items.jsonl", *rows, tokenizer=tokenizer)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    assert sequences(items) == [[1, 2], encode("def main"), [3], encode(" self"), [1, 2]]
    assert items.ids.tolist() == [0, 1, 70, 4, 5]


def test_text_is_an_item_per_line_as_it_stands(tmp_path: Path, tokenizer: object) -> None:
    items = read(tmp_path / "items.txt", "def main", "  ", " self\r", "für", tokenizer=tokenizer)
    assert [tokenizer.decode(tokens) for tokens in sequences(items)] == ["def main", " self", "für"]
    assert items.ids.tolist() == [0, 2, 3]


def test_a_list_of_tokens_in_a_file_of_texts_is_refused(tmp_path: Path, tokenizer: object) -> None:
    assert len(read(tmp_path / "items.txt", "[1, 2] def", "[]", "[x]", tokenizer=tokenizer).ids) == 3
    with pytest.raises(ValueError, match=r"items.txt, line 2: a list of token ids in a file of texts; name the file"):
        read(tmp_path / "items.txt", "def", "[1, 2] ", tokenizer=tokenizer)


@pytest.mark.parametrize(("name", "row"), [("items.txt", "def"), ("items.jsonl", '"def"')])
def test_a_byte_order_mark_is_no_part_of_an_item(tmp_path: Path, tokenizer: object, name: str, row: str) -> None:
    items = read(tmp_path / name, f"\ufeff{row}", row, tokenizer=tokenizer)
    assert sequences(items) == [tokenizer.encode("def", add_special_tokens=False)] * 2


def test_a_text_that_the_tokenizer_does_not_know_is_refused(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"<unk>": 0, "red": 1, "shoes": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    assert sequences(read(tmp_path / "items.jsonl", '"red shoes"', tokenizer=tokenizer)) == [[1, 2]]
    with pytest.raises(
        ValueError, match=r"line 2 has a text .* no tokens for: 'blue shoes' becomes \['<unk>', 'shoes'\]"
    ):
        read(tmp_path / "items.jsonl", '"red shoes"', '{"text": "blue shoes"}', tokenizer=tokenizer)


@pytest.mark.parametrize("chunk_bytes", [1, 20, 1000])
def test_chunks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setattr(lines, "CHUNK_BYTES", chunk_bytes)
    seen = list[int]()
    rows = [f"[{n}, {n + 1}]" for n in range(50)] + ["", '{"tokens": [7], "id": 8}']
    items = read(tmp_path / "items.jsonl", *rows, progress=seen.append)
    assert sequences(items) == [[n, n + 1] for n in range(50)] + [[7]]
    assert items.ids.tolist() == [*range(50), 8]
    assert sum(seen) == (tmp_path / "items.jsonl").stat().st_size


@pytest.mark.parametrize("chunk_bytes", [1, 20, 1000])
def test_items_without_an_id_among_others_are_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(lines, "CHUNK_BYTES", chunk_bytes)
    heard, path = list[str](), tmp_path / "items.jsonl"
    with_id = '{"tokens": [1], "id": 70}', '{"tokens": [2], "id": 0}'
    read(path, *with_id, "", warn=heard.append)
    read(path, "[1]", "", '{"tokens": [2]}', warn=heard.append)
    assert heard == []
    items = read(path, with_id[0], "[2]", "", with_id[1], '{"tokens": [3]}', "[4]", with_id[0], warn=heard.append)
    assert items.ids.tolist() == [70, 1, 0, 4, 5, 70]
    assert heard == [
        f'3 of 6 items in {path} have no "id" and get the indices of their lines, from 1 to 5; give all items an id, '
        "or none"
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[1, 2", ", line 3: Input data was truncated; write [1, 2], "),
        ("[1] [2]", ", line 3: JSON is malformed: trailing characters"),
        ("[1, 2.5]", ", line 3: Expected `int`, got `float`"),
        ("[1, true]", ", line 3: Expected `int`, got `bool`"),
        ("7", ", line 3: Expected "),
        ('{"tokens": "a"}', ", line 3: Expected "),
        ('{"tokens": [1], "id": "a"}', ", line 3: Expected "),
        (b'"\xff"', ", line 3: "),  # what follows, versions of msgspec say differently
        ("[]", ", line 3 has no tokens"),
        ('{"tokens": []}', ", line 3 has no tokens"),
        ("[1, -1]", ", line 3 has token -1; tokens are 0 to 99"),
        ("[1, 100]", ", line 3 has token 100; tokens are 0 to 99"),
        ("[99999999999999999999]", ", line 3 is not a list of token ids but [99999999999999999999]"),
        ('{"tokens": [1], "id": -1}', ", line 3 has id -1; ids are integers from 0 to 2**63 - 1"),
        ("{}", ', line 3 needs either "tokens" or "text"'),
        ('{"tokens": [1], "text": "a"}', ', line 3 needs either "tokens" or "text"'),
        ('"a"', ", line 3 is a text; pass --tokenizer to tokenize it"),
        ('{"text": "a"}', ", line 3 is a text; pass --tokenizer"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: str | bytes, message: str) -> None:
    path = tmp_path / "items.jsonl"
    with pytest.raises(ValueError, match="^" + re.escape(f"{path}{message}")):
        read(path, "[1]", "", row, "[2]", vocab_size=100)


def test_a_text_of_no_tokens_is_named(tmp_path: Path, tokenizer: object) -> None:
    with pytest.raises(ValueError, match="line 2 has no tokens"):
        read(tmp_path / "items.jsonl", '"a"', '""', tokenizer=tokenizer)


def test_text_that_is_no_text_is_named(tmp_path: Path, tokenizer: object) -> None:
    with pytest.raises(ValueError, match="line 2: 'utf-8' codec can't decode"):
        read(tmp_path / "items.txt", "a", b"\xff", tokenizer=tokenizer)


@pytest.mark.parametrize("rows", [(), ("", "  ")])
def test_a_file_without_items_is_refused(tmp_path: Path, rows: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="has no items; write one per line: "):
        read(tmp_path / "items.jsonl", *rows)


def test_a_tokenizers_digest_is_that_of_its_vocabulary(tokenizer: object) -> None:
    digest = tokenizer_digest(tokenizer)
    assert re.fullmatch("[0-9a-f]{16}", digest)
    other = load_catalog_tokenizer(str(TRAINED_TARGET))
    assert tokenizer_digest(other) == digest
    other.add_tokens("<item_0>")
    assert tokenizer_digest(other) != digest


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--tokenizer={tmp_path} cannot be loaded: "):
        load_catalog_tokenizer(str(tmp_path))
