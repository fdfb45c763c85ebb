"""Sets that come with requests wait on the host, and go to the workers when their searches run, if there is room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_trie.catalog import Catalog, file_format
from vllm_trie.engine.catalogs import MOST_IDLE, EngineCatalogs
from vllm_trie.messages import CatalogChanges, GroupTicketMessage
from vllm_trie.options import BeamParams
from vllm_trie.worker.rows.catalogs import RowCatalogs

PARAMS = BeamParams(beam_width=2)


def set_of(number: int, num_items: int = 10) -> bytes:
    return Catalog.from_sequences([[number, item] for item in range(num_items)]).to_bytes()


def bringing(content: bytes) -> GroupTicketMessage:
    return GroupTicketMessage(1, None, item_set=content)


SIZE = Catalog.from_bytes(set_of(0)).num_bytes_on_device


def brought(*uses: Any) -> dict[Any, int]:
    return {key: size for use in uses for key, size in use.brings.items()}


def test_a_set_waits_on_the_host_and_goes_to_workers_once_its_search_runs() -> None:
    catalogs = EngineCatalogs({}, 10 * SIZE)
    use = catalogs.use(PARAMS, bringing(set_of(1)))
    assert catalogs.take_changes() == CatalogChanges()
    assert catalogs.counts().bytes == 0
    catalogs.load(brought(use))
    assert catalogs.take_changes() == CatalogChanges(new={use.rules.catalog: set_of(1)})
    assert catalogs.counts().bytes == SIZE
    catalogs.load(brought(use))
    assert catalogs.take_changes() == CatalogChanges()


def test_neither_the_engine_nor_a_worker_reads_all_of_a_set_for_its_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    catalogs, workers, content = EngineCatalogs({}, 10 * SIZE), RowCatalogs(torch.device("cpu"), SIZE), set_of(1)
    hashed: list[Any] = []
    monkeypatch.setattr(file_format, "_catalog_digest", lambda *parts: hashed.append(parts))
    uses = [catalogs.use(PARAMS, bringing(content)) for _ in range(2)]
    catalogs.load(brought(*uses))
    workers.apply(catalogs.take_changes())
    assert ([*workers.tries], hashed) == ([uses[0].rules.catalog], [])


class Asked:
    """Stop tokens, of which there may be many: they say of a token whether it is one, and are not looked through."""

    def __init__(self, *token_ids: int) -> None:
        self._token_ids = token_ids

    def __contains__(self, token: int) -> bool:
        return token in self._token_ids


def test_each_hypothesis_asks_for_its_own_last_token_among_those_that_stop() -> None:
    params, stops = BeamParams(beam_width=2, allowed_sequences=[[1]], catalog_stop=True), Asked(5, 99)
    use = EngineCatalogs({}, SIZE).use(params, bringing(set_of(1)))
    sequences: list[list[int]] = [[1, 3, 99], [1, 5], [1, 5, 5], [], [1, 99]]
    assert use.answer(stops, sequences) == {"item_ids": [3, 5, 5, -1, -1]}  # type: ignore[arg-type]


def test_equal_sets_are_held_and_counted_once() -> None:
    catalogs, first = EngineCatalogs({}, SIZE), set_of(1)
    uses = [catalogs.use(PARAMS, bringing(content)) for content in (first, bytes(bytearray(first)))]
    assert catalogs.has_room(brought(*uses))
    catalogs.load(brought(*uses))
    assert [*catalogs.take_changes().new.values()] == [first]
    (catalog,) = catalogs.by_digest.values()
    assert catalog.data.obj is first
    assert catalog.to_bytes() is first


def test_a_set_that_waits_and_is_given_up_leaves_nothing() -> None:
    catalogs = EngineCatalogs({}, SIZE)
    catalogs.use(PARAMS, bringing(set_of(1))).release()
    assert not catalogs.by_digest
    assert not catalogs._users
    assert catalogs.take_changes() == CatalogChanges()


def test_running_searches_share_the_room_and_idle_sets_make_way_the_oldest_first() -> None:
    catalogs = EngineCatalogs({}, 3 * SIZE)
    uses = [catalogs.use(PARAMS, bringing(set_of(number))) for number in range(4)]
    assert catalogs.has_room(brought(*uses[:3]))
    assert not catalogs.has_room(brought(*uses))
    for use in uses[:3]:
        catalogs.load(brought(use))
        use.release()
    catalogs.take_changes()
    catalogs.load(brought(uses[3]))
    changes = catalogs.take_changes()
    assert [*changes.gone] == [uses[0].rules.catalog]
    assert [*changes.new] == [uses[3].rules.catalog]
    catalogs.check_invariants(brought(uses[3]))


def test_a_search_that_was_preempted_gets_its_set_again() -> None:
    catalogs = EngineCatalogs({}, SIZE)
    preempted, other = catalogs.use(PARAMS, bringing(set_of(1))), catalogs.use(PARAMS, bringing(set_of(2)))
    for running in (preempted, other, preempted):
        catalogs.load(brought(running))
        catalogs.check_invariants(brought(running))
        assert [*catalogs.take_changes().new] == [running.rules.catalog]


def test_few_sets_stay_while_nobody_uses_them() -> None:
    catalogs = EngineCatalogs({}, 1000 * SIZE)
    for number in range(MOST_IDLE + 9):
        use = catalogs.use(PARAMS, bringing(set_of(number)))
        catalogs.load(brought(use))
        use.release()
    assert len(catalogs.by_digest) == MOST_IDLE + 1


def test_what_a_name_stands_for_takes_no_room_of_requests(tmp_path: Any) -> None:
    (tmp_path / "items").write_bytes(set_of(1))
    catalogs = EngineCatalogs({"items": str(tmp_path / "items")}, SIZE)
    named, other = catalogs.use(PARAMS, bringing(set_of(1))), catalogs.use(PARAMS, bringing(set_of(2)))
    assert catalogs.has_room(brought(named, other))
    catalogs.load(brought(named, other))
    assert [*catalogs.take_changes().new] == [other.rules.catalog]
    catalogs.name("items", Catalog.from_bytes(set_of(2)))  # which was loaded by request, and has a name from now on
    assert catalogs.has_room(brought(other, catalogs.use(PARAMS, bringing(set_of(3)))))


@given(st.data())
def test_workers_hold_what_running_searches_need_and_never_more_than_there_is_room_for(data: st.DataObject) -> None:
    """Whatever comes, is admitted, preempted, given up and ended, in any order."""
    room = data.draw(st.integers(1, 4)) * SIZE
    catalogs, workers = EngineCatalogs({}, room), RowCatalogs(torch.device("cpu"), room)
    waiting, running = list[Any](), list[Any]()
    for _ in range(data.draw(st.integers(1, 30))):
        step = data.draw(st.sampled_from(["come", "admit", "preempt", "give up", "end"]))
        if step == "come":
            own = set_of(data.draw(st.integers(0, 5)), data.draw(st.integers(1, 10)))
            waiting.append(catalogs.use(PARAMS, bringing(own)))
        elif step == "admit" and waiting and catalogs.has_room(brought(*running, waiting[0])):
            running.append(waiting.pop(0))
            catalogs.load(brought(*running))
        elif step == "preempt" and running:
            waiting.insert(0, running.pop())
        elif step == "give up" and waiting:
            waiting.pop().release()
        elif step == "end" and running:
            running.pop(0).release()
        catalogs.check_invariants(brought(*running))
        workers.apply(catalogs.take_changes())
        assert workers.tries.keys() == catalogs._held >= brought(*running).keys()
        tries = workers.tries.values()
        held = sum(t.nbytes for trie in tries for t in (trie.first_child, trie.tokens, trie.is_item))
        assert held == catalogs.counts().bytes <= room
    for use in waiting + running:
        use.release()
    catalogs.load({})
    assert catalogs.by_digest.keys() == catalogs._held
    assert not any(catalogs._users.values())


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_load_that_failed_is_taken_back_whatever_waits(is_waiting: bool) -> None:
    """Some workers have the set of a search that waits by a file that others could not read."""
    catalogs = EngineCatalogs({}, SIZE)
    use = catalogs.use(PARAMS, bringing(set_of(1)))
    if not is_waiting:
        catalogs.load(brought(use))
        catalogs.take_changes()
    catalogs.take_back(use.rules.catalog)
    catalogs.load(brought(use))
    assert [*catalogs.take_changes().new] == [use.rules.catalog] * is_waiting
