"""A catalog finds what a trie of dictionaries finds, in memory and in a file. What was not written so is refused."""

from __future__ import annotations

import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_trie import catalog as catalog_package
from vllm_trie.catalog import Catalog
from vllm_trie.catalog.arrays import CatalogArrays
from vllm_trie.catalog.file_format import START, CatalogHeader, pack_catalog
from vllm_trie.catalog.structure import check_structure

ITEM = "an item"
Sequences = list[list[int]]
SEQUENCES = st.lists(st.lists(st.integers(0, 3) | st.sampled_from([9, 2**31 - 2]), min_size=1, max_size=5), min_size=1)


class Node(dict):
    """Children by token, and the item that ends here."""


def trie_of(sequences: Sequences) -> Node:
    root = Node()
    for index, sequence in enumerate(sequences):
        node = root
        for token in sequence:
            node = node.setdefault(token, Node())
        node.setdefault(ITEM, index)  # of equal sequences the first one counts
    return root


def children(node: Node) -> list[tuple[int, Node]]:
    return sorted((token, child) for token, child in node.items() if token != ITEM)


def padded(sequences: Sequences, length: int) -> np.ndarray:
    return np.array([sequence + [-1] * (length - len(sequence)) for sequence in sequences])


@given(SEQUENCES)
def test_nodes_are_those_of_a_trie_level_by_level_and_ascending(sequences: Sequences) -> None:
    catalog = Catalog.from_sequences(sequences)
    check_structure(catalog)
    level, number, ids = [trie_of(sequences)], 0, []
    while level:
        below = []
        for node in level:
            assert catalog.first_child[number + 1] - catalog.first_child[number] == len(children(node))
            first = catalog.first_child[number]
            assert catalog.tokens[first : first + len(children(node))].tolist() == [
                token for token, _ in children(node)
            ]
            assert catalog.is_item[number] == (ITEM in node)
            ids += [node[ITEM]] if ITEM in node else []
            below += [child for _, child in children(node)]
            number += 1
        level = below
    assert catalog.num_nodes == number
    assert catalog.item_ids.tolist() == ids


@given(SEQUENCES)
def test_the_tokens_of_a_depth_are_those_of_all_items_at_it(items: Sequences) -> None:
    levels = Catalog.from_sequences(items).tokens_by_depth()
    expected = [sorted({item[depth] for item in items if depth < len(item)}) for depth in range(len(levels))]
    assert [level.tolist() for level in levels] == expected
    assert {level.dtype for level in levels} == {np.dtype(np.int64)}
    assert len(levels) == max(map(len, items))


def test_a_long_item_of_high_tokens_takes_no_memory_for_those_below_at_each_depth() -> None:
    catalog = Catalog.from_sequences([[1], [1 << 30] * 100])
    tracemalloc.start()
    catalog.tokens_by_depth()
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 100_000


@given(SEQUENCES)
def test_the_header_says_what_the_items_are(sequences: Sequences) -> None:
    catalog, items = Catalog.from_sequences(sequences), set(map(tuple, sequences))
    prefixes = {item[:end] for item in items for end in range(len(item))}
    assert catalog.num_items == len(items)
    assert (catalog.shortest, catalog.longest) == (min(map(len, items)), max(map(len, items)))
    assert catalog.max_token == max(map(max, items))
    assert catalog.is_prefix_free == (not prefixes & items)
    longer = prefixes | items
    for depth, most in enumerate(catalog.most_children):
        parents = [item[:depth] for item in longer if len(item) == depth + 1]
        assert most == max(map(parents.count, parents))
    assert len(catalog.most_children) == catalog.longest
    assert catalog.num_bytes_on_device == 9 * catalog.num_nodes + 4


@given(SEQUENCES, st.lists(st.lists(st.integers(0, 4), max_size=6)), st.data())
def test_items_are_found_and_nothing_else(sequences: Sequences, others: Sequences, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=len(sequences), max_size=len(sequences)))
    catalog = Catalog.from_sequences(iter(sequences), ids)
    id_of = {tuple(sequence): own_id for sequence, own_id in reversed(list(zip(sequences, ids, strict=True)))}
    asked = sequences + others + [sequence[:-1] for sequence in sequences]
    found = catalog.find(padded(asked, 6))
    assert found.tolist() == [id_of.get(tuple(sequence), -1) for sequence in asked]
    listed = {tuple(catalog.sequence(index)): own_id for index, own_id in enumerate(catalog.item_ids.tolist())}
    assert listed == id_of


@given(SEQUENCES, st.data())
def test_items_in_a_row_are_told_apart(sequences: Sequences, data: st.DataObject) -> None:
    free = [item for item in sequences if not any(item != other and other == item[: len(other)] for other in sequences)]
    catalog, indices = Catalog.from_sequences(free), st.integers(0, len(free) - 1)
    rows = data.draw(st.lists(st.lists(indices, min_size=2, max_size=2), min_size=1, max_size=5))
    joined = [free[first] + free[second] for first, second in rows]
    found = catalog.find_in_a_row(padded(joined, 10), 2)
    assert found.tolist() == [[free.index(free[index]) for index in row] for row in rows]
    cut = catalog.find_in_a_row(padded([row[:-1] for row in joined], 10), 2)
    assert all(second == -1 for _, second in cut.tolist())


@given(SEQUENCES)
def test_a_catalog_survives_bytes_and_files(tmp_path_factory: pytest.TempPathFactory, sequences: Sequences) -> None:
    catalog = Catalog.from_sequences(sequences, vocab_size=2**31 - 1, tokenizer="abc")
    path = tmp_path_factory.mktemp("catalogs") / "items.catalog"
    catalog.save(path)
    for copy in (Catalog.from_bytes(catalog.to_bytes()), Catalog.open(path)):
        ours, theirs = ({**vars(c), "name": "", "data": bytes(c.data)} for c in (catalog, copy))
        assert repr(ours) == repr(theirs)
        assert not copy.tokens.flags.writeable


def test_sequences_may_be_arrays() -> None:
    items = np.array([[5, 6], [5, 7]], np.int32)
    assert Catalog.from_sequences(items, ids=np.array([7, 8])).find(items).tolist() == [7, 8]


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "a catalog needs at least one item"),
        ([[1], []], "sequence 1 has no tokens"),
        ([[1], [2, -1]], "sequence 1 has token -1; tokens are 0 to 2147483646"),
        ([[1], [2], [3, 2**31 - 1]], "sequence 2 has token 2147483647; "),
        ([[1], [2, 2.0]], "sequence 1 is not a list of token ids but [2, 2.0]"),
        ([[1], [2**70]], "sequence 1 is not a list of token ids but [1180591"),
        ([[1], [-(2**70)]], "sequence 1 is not a list of token ids but [-1180591"),
        ([[1], iter([2])], "sequence 1 is not a list of token ids but <list_iterator"),
        ([[1], "ab"], "sequence 1 is not a list of token ids but ab"),
        ([[1], 5], "sequence 1 is not a list of token ids but 5"),
    ],
)
def test_a_bad_sequence_is_named(sequences: list, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Catalog.from_sequences(sequences)


def test_a_token_beyond_the_vocabulary_is_named() -> None:
    with pytest.raises(ValueError, match="sequence 1 has token 9; tokens are 0 to 8"):
        Catalog.from_sequences([[8], [3, 9]], vocab_size=9)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1], "1 ids do not match 2 sequences; pass one for each"),
        ([1, -1], "sequence 1 has id -1; ids are integers from 0 to 2**63 - 1"),
        ([1, 2**63], "sequence 1 has id 9223372036854775808; "),
        ([1, 2.0], "sequence 1 has id 2.0; "),
        (["a", 2], "sequence 0 has id 'a'; "),
    ],
)
def test_a_bad_id_is_named(ids: list, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Catalog.from_sequences([[1], [2]], ids)


@pytest.mark.parametrize("where", ["preamble", "checksum", "header", "arrays"])
def test_a_flipped_bit_is_refused(where: str) -> None:
    good = Catalog.from_sequences([[1, 2], [3]]).to_bytes()
    positions = {"preamble": range(8, 24), "checksum": range(24, START), "header": range(START, START + 200)}
    for position in positions.get(where, range(START + 200, len(good))):
        data = bytearray(good)
        data[position] ^= 1 << position % 8
        with pytest.raises(
            ValueError, match=r"^items is (damaged|cut short or damaged|a catalog of format)\b.*; .* build$"
        ):
            Catalog.from_bytes(bytes(data), "items")


@given(st.data())
def test_what_is_cut_short_or_goes_on_is_refused(data: st.DataObject) -> None:
    good = Catalog.from_sequences([[1, 2], [3]]).to_bytes()
    length = data.draw(st.integers(0, len(good) + 100).filter(lambda length: length != len(good)))
    with pytest.raises(ValueError, match=r"^items is (cut short or damaged|not a catalog)\b.*; .* build$"):
        Catalog.from_bytes((good + bytes(100))[:length], "items")


def test_what_is_no_catalog_is_refused(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_bytes(b"\x93NUMPY" + bytes(1000))
    (tmp_path / "empty").touch()
    for name in ("foreign", "empty"):
        with pytest.raises(ValueError, match=rf"{name} is not a catalog; build one with python -m"):
            Catalog.open(tmp_path / name)
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ValueError, match=rf"catalog {path} cannot be read: .*; pass a file written by build"):
            Catalog.open(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_nodes": 2**40}, "its header does not fit its 192 bytes"),
        ({"num_items": -1}, "its header does not fit its 192 bytes"),
        ({"num_items": 3, "num_nodes": 1}, "its header does not fit its 192 bytes"),
        ({"num_nodes": None}, "its header cannot be read"),
    ],
)
def test_a_header_that_does_not_fit_is_refused_whatever_the_checksum_says(changed: Any, message: str) -> None:
    good = Catalog.from_sequences([[1, 2], [3]])
    header = CatalogHeader(
        **{name: value for name, value in vars(good).items() if name in CatalogHeader.__annotations__} | changed
    )
    data = pack_catalog(header, CatalogArrays(good.item_ids, good.first_child, good.tokens, good.is_item))
    message = message.replace("192", str(len(data)))
    with pytest.raises(ValueError, match=f"^items is not a catalog: {message}; build it again with python -m"):
        Catalog.from_bytes(data, "items")


def test_another_format_is_told_from_a_damaged_file() -> None:
    data = bytearray(Catalog.from_sequences([[1]]).to_bytes())
    data[8] = 2
    with pytest.raises(ValueError, match="is a catalog of format 2, and this vllm_trie reads 1; build it again"):
        Catalog.from_bytes(bytes(data))


def test_a_catalog_fits_the_vocabulary_it_was_built_for() -> None:
    catalog = Catalog.from_sequences([[1, 9]], vocab_size=20, tokenizer="abc")
    catalog.check_fits(10, None)
    catalog.check_fits(32, "abc")
    for vocab_size, tokenizer, reason in [
        (9, "abc", "it has token 9, and the model has 9 tokens"),
        (20, "def", "its tokenizer has digest abc, and the model's def"),
    ]:
        with pytest.raises(ValueError, match=f"catalog .* was built for another vocabulary: {reason}; build it again"):
            catalog.check_fits(vocab_size, tokenizer)
    unknown = Catalog.from_sequences([[1, 9]], vocab_size=20)
    unknown.check_fits(20, "def")
    with pytest.raises(ValueError, match="another vocabulary: it has 20 tokens, and the model has 10"):
        unknown.check_fits(10, "def")


def test_a_file_is_replaced_whole_and_readers_keep_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "items.catalog"
    Catalog.from_sequences([[1, 2]], ids=[10]).save(path)
    old = Catalog.open(path)
    Catalog.from_sequences([[3, 4]], ids=[20]).save(path)
    assert old.find(np.array([[1, 2], [3, 4]])).tolist() == [10, -1]
    assert Catalog.open(path).find(np.array([[1, 2], [3, 4]])).tolist() == [-1, 20]

    def no_space(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="no space"):
        Catalog.from_sequences([[5]]).save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["items.catalog"]
    assert Catalog.open(path).item_ids.tolist() == [20]


def test_a_large_catalog_finds_all_of_its_items() -> None:
    """100,000 items of 1 to 40 tokens: few of them long, many of them prefixes of others."""
    random = np.random.default_rng(0)
    lengths = np.minimum(random.geometric(0.3, 100_000), 40)
    sequences = [random.integers(0, 300, length).tolist() for length in lengths]
    sequences += [sequence[:-1] for sequence in sequences[:1000] if len(sequence) > 1]
    catalog = Catalog.from_sequences(sequences)
    check_structure(catalog)
    id_of = {tuple(sequence): index for index, sequence in reversed(list(enumerate(sequences)))}
    assert catalog.num_items == len(id_of)
    assert catalog.find(padded(sequences, 40)).tolist() == [id_of[tuple(sequence)] for sequence in sequences]


def test_names_that_users_import_stay() -> None:
    assert {*catalog_package.__all__} == {"NO_ITEM", "Catalog", "CatalogStore", "check_structure", "tokenizer_digest"}
    assert all(hasattr(catalog_package, name) for name in catalog_package.__all__)


@pytest.mark.parametrize("factor", [1, 1_000_003], ids=["small", "large"])
def test_ids_are_counted_whatever_numbers_they_are(factor: int) -> None:
    ids = [factor * number for number in (0, 2, 5, 2, 9, 2, 5)]
    assert Catalog.from_sequences([[token] for token in range(7)], ids).most_with_one_id == 3
    assert Catalog.from_sequences([[token] for token in range(7)]).most_with_one_id == 1
