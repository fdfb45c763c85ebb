"""What is closed to a search is what leads to excluded items alone, whatever version of a catalog it goes along."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_trie.catalog import Catalog
from vllm_trie.engine.catalog_exclusion import Exclusion, SentExclusion, read_item_list, why_nothing_is_excluded
from vllm_trie.engine.catalogs import EngineCatalogs
from vllm_trie.messages import GroupTicketMessage
from vllm_trie.options import BeamParams
from vllm_trie.search.constraints.catalog import MOST_PLACES
from vllm_trie.search.constraints.closed_nodes import (
    KIND_BITS,
    LEAST_PARTS,
    NO_ITEM_ENDS,
    NO_WAY_ON,
    PART,
    ClosedNodes,
    NodeCodes,
)
from vllm_trie.worker.rows.catalogs import RowCatalogs

ALONG = BeamParams(beam_width=2, catalog="items")
CPU = torch.device("cpu")
sequences = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=14, unique=True
)


def ids_of(*ids: int) -> np.ndarray:
    return np.array(sorted({*ids}), np.int64)


def closed_by(exclusion: Exclusion) -> dict[int, int]:
    return {int(code) >> KIND_BITS: int(code) & 3 for code in exclusion.nodes.codes}


@given(sequences, st.data())
def test_closed_nodes_are_those_that_lead_to_no_item_that_is_left(
    items: list[tuple[int, ...]], data: st.DataObject
) -> None:
    ids = data.draw(
        st.lists(st.integers(0, 6), min_size=len(items), max_size=len(items))
    )  # some have several sequences
    excluded = data.draw(st.sets(st.integers(0, 8)))  # some are no item's
    catalog = Catalog.from_sequences(items, ids)
    exclusion = Exclusion.of(catalog, ids_of(*excluded))
    left = {item for item, own_id in zip(items, ids, strict=True) if own_id not in excluded}
    expected, together, (paths) = dict[int, int](), dict[int, int](), {0: ()}
    for node in range(1, catalog.num_nodes):
        parent = int(catalog.parents[node])
        if parent not in paths:
            continue  # nobody comes there
        path = (*paths[parent], int(catalog.tokens[node]))
        ends, goes_on = path in {*items}, catalog.first_child[node] < catalog.first_child[node + 1]
        may_end, may_go_on = path in left, any(item[: len(path)] == path != item for item in left)
        if may_end or may_go_on:  # where it may end, a stop token may follow
            paths[node] = path
        kind = NO_ITEM_ENDS * (ends and not may_end) | NO_WAY_ON * (bool(goes_on) and not may_go_on)
        if kind:
            expected[node] = kind if may_end or may_go_on else NO_ITEM_ENDS | NO_WAY_ON
            together[parent] = together.get(parent, 0) + 1
    assert closed_by(exclusion) == expected
    assert exclusion.nodes.codes.tolist() == sorted(exclusion.nodes.codes.tolist())
    assert exclusion.nodes.most_together == max(together.values(), default=0)


@given(st.lists(st.sets(st.integers(0, 300), max_size=150), min_size=1, max_size=6), st.data())
def test_each_search_finds_its_own_closed_nodes_wherever_they_lie(
    searches: list[set[int]], data: st.DataObject
) -> None:
    closed, kinds, kept = ClosedNodes(CPU), dict[str, dict[int, int]](), set[str]()
    for number, nodes in enumerate(searches):
        for name in data.draw(st.sets(st.sampled_from(sorted(kept)))) if kept else ():
            closed.drop(name)
            kept.remove(name)
        of_nodes = {node: data.draw(st.integers(1, 3)) for node in sorted(nodes)}
        codes = np.array([node << KIND_BITS | kind for node, kind in of_nodes.items()], np.int64)
        most = max((sum(first <= node < first + 20 for node in nodes) for first in range(300)), default=0)
        closed.add(str(number), (codes, most))  # type: ignore[arg-type]
        kinds[str(number)] = of_nodes
        kept.add(str(number))
    every = torch.arange(305)
    for name in kept:
        part = torch.full_like(every, closed.part(name))
        assert closed.kinds(part, every).tolist() == [kinds[name].get(node, 0) for node in range(305)]
        children = closed.kinds_of_children(part[:1], every[7:8], 20)
        assert (closed.codes.diff() >= 0).all()
        assert children[0].tolist() == [kinds[name].get(node, 0) for node in range(7, 27)]
    assert closed.kinds(torch.zeros_like(every), every).sum() == 0
    num_parts = 2 * (1 + sum(len(nodes) // PART + 1 for nodes in searches))
    assert len(closed.codes) <= PART * max(LEAST_PARTS, num_parts)


def of_nodes(count: int) -> NodeCodes:
    return NodeCodes(np.arange(1, count + 1) << KIND_BITS | NO_WAY_ON, 1)


HISTORIES = range(1, 1000, 7)


@pytest.mark.parametrize(
    ("sizes", "most"), [(HISTORIES, 2), ([*HISTORIES, *range(1000, 100_000, 5_000)], 8)], ids=["hundreds", "most"]
)
def test_what_graphs_know_changes_a_handful_of_times(sizes: Sequence[int], most: int) -> None:
    """Searches come and go, and exclude ever more, while 32 are kept."""
    closed, known = ClosedNodes(CPU), list[tuple[int, ...]]()
    for number, size in enumerate(sizes):
        closed.drop(str(number - 32))
        closed.add(str(number), of_nodes(size))
        codes, *lengths = closed.for_kernels
        known.append((len(codes), *lengths))
        assert size < 1 << closed.num_bits
    assert len({*known}) == most


def test_lists_are_looked_up_without_a_wait_where_an_engine_has_some(tmp_path: Path) -> None:
    Catalog.from_sequences([[1, 2], [3]]).save(tmp_path / "items")
    (tmp_path / "blocked").write_text("1")
    files = {"items": str(tmp_path / "items")}
    with_list = EngineCatalogs(files, 1 << 20, {"blocked": str(tmp_path / "blocked")})["items"]
    assert "parents" in vars(with_list)
    assert "parents" not in vars(EngineCatalogs(files, 1 << 20)["items"])


def test_a_search_for_too_many_items_of_the_engines_own_version_is_refused(tmp_path: Path) -> None:
    old, new = (Catalog.from_sequences([[own] for own in range(count)]) for count in (3, 7))
    new.save(tmp_path / "items")
    catalogs, most = EngineCatalogs({"items": str(tmp_path / "items")}, 1 << 20), MOST_PLACES // new.num_nodes
    for num_items, refusal in (
        (most, None),
        (most + 1, f"is too many for a search that excludes items; pass at most {most:,}"),
    ):
        assert why_nothing_is_excluded(old, num_items) is None
        params = ALONG.model_copy(update={"catalog_items": num_items})
        assert catalogs.use(params, GroupTicketMessage(1, None)).refusal is None
        found = catalogs.use(params, ticket(old, 1)).refusal
        assert found == (refusal and f"cannot use this version of its catalog: catalog_items={num_items} {refusal}")


def ticket(catalog: Catalog, *ids: int) -> GroupTicketMessage:
    return GroupTicketMessage(1, None, exclusion=vars(SentExclusion.of(catalog, ids_of(*ids))))


def test_ids_are_looked_up_again_where_the_engine_has_another_version(tmp_path: Path) -> None:
    old, new = (Catalog.from_sequences(rows, [7, 8, 9]) for rows in ([[1, 2], [1, 3], [4]], [[4], [1, 2], [5, 6]]))
    new.save(tmp_path / "items")
    catalogs, workers = EngineCatalogs({"items": str(tmp_path / "items")}, 1 << 20), RowCatalogs(CPU, 1 << 20)
    use = catalogs.use(ALONG, ticket(old, 9, 7))
    expected = Exclusion.of(new, ids_of(7, 9))
    assert use.excludes == expected.digest == catalogs.use(ALONG, ticket(new, 7, 9, 9)).excludes
    catalogs.load(use.brings)
    changes = catalogs.take_changes()
    assert changes.closed[expected.digest].codes.tolist() == expected.nodes.codes.tolist()
    workers.apply(changes)
    assert workers.closed.part(use.excludes) > 0


def test_a_list_is_read_when_a_search_begins_and_goes_with_what_its_request_excludes(tmp_path: Path) -> None:
    catalog = Catalog.from_sequences([[own] for own in range(6)])
    catalog.save(tmp_path / "items")
    (tmp_path / "blocked").write_text("4\n\n 2\n77\n4\n")
    catalogs = EngineCatalogs({"items": str(tmp_path / "items")}, 1 << 20, {"blocked": str(tmp_path / "blocked")})
    assert catalogs.lists["blocked"].tolist() == [2, 4, 77]
    blocked = ALONG.model_copy(update={"exclude_list": "blocked"})
    both, alone, nothing = (
        catalogs.use(blocked, ticket(catalog, 1)),
        catalogs.use(blocked, GroupTicketMessage(1, None)),
        catalogs.use(ALONG, GroupTicketMessage(1, None)),
    )
    assert both.excludes == Exclusion.of(catalog, ids_of(1, 2, 4, 77)).digest
    assert alone.excludes == Exclusion.of(catalog, ids_of(2, 4, 77)).digest
    assert (nothing.excludes, nothing.rules.excludes) == (None, False)
    for use in (both, alone, nothing):
        use.release()
    assert [*catalogs.by_digest] == [catalog.digest]


WRONG: dict[str, Any] = {"a word": "x\n1\n", "a fraction": "1.5", "too large": str(1 << 63), "two": "1,2"}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_is_no_list_is_refused_by_name(tmp_path: Path, case: str) -> None:
    (tmp_path / "list").write_text(f"1\n\n{WRONG[case]}")
    with pytest.raises(ValueError, match=r"list, line 3: '.*' is not an item's id; write one integer of 64 bits per"):
        read_item_list(str(tmp_path / "list"))
    (tmp_path / "list").write_bytes(b"\xff\x00")
    with pytest.raises(ValueError, match="list is not UTF-8 text; write one item id per line"):
        read_item_list(str(tmp_path / "list"))
    with pytest.raises(ValueError, match="missing cannot be read: No such file or directory; pass a file with one"):
        read_item_list(str(tmp_path / "missing"))
