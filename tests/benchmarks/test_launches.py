"""Launches of a step are counted without a GPU, and grow for no feature that is not asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.device_bytes import LOGITS_READ, of_kernel
from benchmarks.launch_counter import LaunchCounter
from benchmarks.tables.launches import SPECULATING, TABLE, VOCAB_SIZE, counted, counted_by_graphs, counted_forest
from benchmarks.weightless import NOWHERE, kernels_of_package, nowhere
from vllm_trie.search.devices import uploaded_for_search
from vllm_trie.worker.kernels import SLOTS
from vllm_trie.worker.select.selection_graphs import LOGITS_OF_BYTE, MOST_BYTES_WITHOUT_LOGITS, MOST_OWN_BYTES

MOST_LAUNCHES = {  # they may only fall
    **dict.fromkeys(
        ("plain", 'semantics="vllm"', "temperature and min_p", "along a catalog", "in 2 groups of beams"), 5
    ),
    **{"log-probabilities": 7, "controlled": 8},
}
MOST_OF_WIDE = {  # of many beams; likewise
    **dict.fromkeys(("plain", 'semantics="vllm"', "temperature and min_p"), 11),
    **{"log-probabilities": 13, "controlled": 14, "along a catalog": 9},
}
MOST_OF_FOREST, MOST_WAITS_OF_FOREST = 94, 1  # of four layers, which the host reads without waiting; likewise
MOST_OF_WIDE_FOREST = 302  # of more than 64 drafts a layer; likewise
MOST_CALLS = {
    ("plain", 1): 26,
    ("plain", 8): 26,
    ("controlled", 1): 43,
    ("along a catalog", 1): 34,
    ("log-probabilities", 1): 29,
}  # of ours, by groups; likewise
MOST_CALLS_BY_GRAPHS = 23, 25  # of plain beams, however many groups there are, and along a catalog; likewise
MOST_WITH_ORDINARY = 4  # more where there are ordinary rows in the batch; likewise


def test_the_table_is_measured_and_no_step_waits_but_for_stop_strings(tmp_path: Path) -> None:
    assert main(["--only", "launches", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "launches.json").read_text())
    rows = [dict(zip(TABLE.columns, row, strict=True)) for cell in content["cells"] for row in cell["rows"]]
    searches = {row["search"] for row in rows}
    assert searches > {"plain", "controlled", "along a catalog", "in 2 groups of beams"}
    speculating = [row for row in rows if row["search"] == SPECULATING]
    counts = {row["beams x groups"]: (row["step"], row["waits"]) for row in speculating}
    most = {"4 x 1": MOST_OF_FOREST, "4 x 8": MOST_OF_FOREST, "40 x 1": MOST_OF_WIDE_FOREST}
    assert counts.keys() == most.keys()
    for name, (launches, waits) in counts.items():  # one less where another step has made numbers that are kept
        assert most[name] - 1 <= launches <= most[name], name
        assert waits == MOST_WAITS_OF_FOREST, name
    rows = [row for row in rows if row not in speculating]
    assert all(row["waits"] == (row["search"] == "stop strings") for row in rows), rows
    for row in rows:
        assert row["in all"] < row["step"] < row["with ordinary rows"], row


@pytest.mark.parametrize(("width", "num_groups"), [(4, 1), (64, 1), (4, 8)])
def test_a_plain_step_takes_no_more_launches_than_today(width: int, num_groups: int) -> None:
    assert counted("plain", width, num_groups).launches <= MOST_LAUNCHES["plain"]


@pytest.mark.parametrize(("search", "width"), [*((search, 512) for search in MOST_OF_WIDE), ("plain", 5000)])
def test_a_step_of_many_beams_takes_no_more_launches_than_today(search: str, width: int) -> None:
    assert counted(search, width, 1).launches <= MOST_OF_WIDE[search]


@pytest.mark.parametrize("search", MOST_LAUNCHES)
def test_a_step_takes_no_more_launches_than_today(search: str) -> None:
    assert counted(search, 4, 1).launches <= MOST_LAUNCHES[search]


@pytest.mark.parametrize(("search", "num_groups"), [("plain", 1), ("plain", 8), ("controlled", 1)])
def test_ordinary_rows_in_a_batch_with_beams_take_few_launches_more(search: str, num_groups: int) -> None:
    """Besides an upload of counts that steps of the same beams alone have made once."""
    alone, together = (counted(search, 4, num_groups, num_ordinary, is_whole=True).launches for num_ordinary in (0, 3))
    assert 0 < together - (alone + 1) <= MOST_WITH_ORDINARY


@pytest.mark.parametrize(("search", "num_groups"), MOST_CALLS)
def test_the_host_makes_no_more_calls_than_today(search: str, num_groups: int) -> None:
    step = counted(search, 4, num_groups, is_whole=True)
    assert 0 < step.calls <= MOST_CALLS[search, num_groups]
    assert step.copies <= 1, "more than one upload"


@pytest.mark.parametrize(
    ("search", "width", "num_groups"),
    [
        *(("plain", *shape) for shape in ((4, 1), (4, 8), (256, 1), (5000, 1))),
        *(("along a catalog", *shape) for shape in ((4, 1), (4, 8), (512, 1), (5000, 1))),
        *((search, 4, 1) for search in ('semantics="vllm"', "log-probabilities", "in 2 groups of beams")),
    ],
)
def test_a_steady_step_is_one_replay_and_nothing_else(search: str, width: int, num_groups: int) -> None:
    step, alone = counted_by_graphs(search, width, num_groups), counted(search, width, num_groups, is_whole=True)
    assert (step.launches, step.waits, step.replays) == (0, 0, 1)
    # Each depth of a catalog has a graph for many beams, which another step has taken last.
    assert step.uploads <= (width > SLOTS[-1] and search == "along a catalog")
    assert step.of_graph == alone.launches - 1 - alone.copies + 2, "all but room for tokens, and what groups carry"
    assert step.calls <= MOST_CALLS_BY_GRAPHS[search == "along a catalog"] + step.uploads


@pytest.mark.parametrize("search", ["plain", "along a catalog", "log-probabilities"])
@pytest.mark.parametrize("width", [4, 512, 5000])
def test_graphs_by_kernels_take_as_much_memory_as_is_left_for_them(search: str, width: int) -> None:
    num_bytes = counted(search, width, 1).most_held
    assert 0 < num_bytes < width * VOCAB_SIZE // LOGITS_OF_BYTE + MOST_BYTES_WITHOUT_LOGITS - MOST_OWN_BYTES


@pytest.mark.parametrize(("search", "most"), [("controlled", 2), ("min_p and top_p", 1), ("sampled beams", None)])
def test_of_other_steps_graphs_hold_what_they_can(search: str, most: int | None) -> None:
    step = counted_by_graphs(search, 4, 1)
    assert step.waits == 0
    assert step.replays == (most is not None)
    assert most is None or step.launches <= most


@pytest.mark.parametrize("num_groups", [1, 8])
def test_forests_take_no_more_launches_and_waits_than_today_however_many_there_are(num_groups: int) -> None:
    forests = counted_forest(4, num_groups)
    assert forests.launches <= MOST_OF_FOREST
    assert forests.waits <= MOST_WAITS_OF_FOREST


@pytest.mark.parametrize(("search", "width"), [("plain", 4), ("plain", 512), ("plain", 5000), ("along a catalog", 512)])
def test_a_step_by_kernels_goes_over_the_logits_once(search: str, width: int) -> None:
    step, of_logits = counted(search, width, 1), 2 * width * VOCAB_SIZE
    assert of_logits < step.num_bytes < 1.15 * of_logits
    assert 0 < step.most_held < 0.05 * of_logits


SHORT, LONG = nowhere(4, dtype=torch.float32), nowhere(6, 4, dtype=torch.float32)
WHERE = nowhere(2)


@pytest.mark.parametrize(
    ("operation", "num_bytes"),
    [
        (lambda: LONG + LONG, 3 * 96),
        (lambda: LONG + SHORT.expand(6, 4), 2 * 96 + 16),
        (lambda: LONG.add_(1), 2 * 96),
        (lambda: LONG.bool(), 96 + 24),
        (lambda: LONG[::2].sum(dim=0), 48 + 16),
        (lambda: LONG.topk(2), 96 + 6 * 2 * (4 + 8)),
        (lambda: LONG.gather(0, nowhere(1, 4)), 16 + 32 + 16),
        (lambda: LONG[WHERE], 32 + 16 + 32),
        (lambda: LONG[WHERE, WHERE], 8 + 16 + 16 + 8),
        (lambda: LONG.index_select(1, WHERE), 48 + 16 + 48),
        (lambda: LONG.index_fill_(1, WHERE, 0.0), 48 + 16),
        (lambda: LONG.index_put_((WHERE,), SHORT), 32 + 16 + 16),
        (lambda: (LONG.view(4, 6), LONG.T, nowhere(9)), 0),
        (lambda: torch.zeros(9) + 1, 0),
    ],
)
def test_bytes_are_those_of_operands_and_results(operation: Callable[[], object], num_bytes: int) -> None:
    with LaunchCounter() as counter:
        operation()
    assert counter.num_bytes == num_bytes


def test_bytes_of_kernels_are_those_of_tensors_and_of_the_logits_that_they_read() -> None:
    logits, chosen = nowhere(3, 1000, dtype=torch.bfloat16), nowhere(1, 5)
    best = nowhere(3, 64, dtype=torch.float32)
    given: dict[str, Any] = {"logits": logits, "index": nowhere(2), "going": best, "vocab_size": 1000, "stride": 1000}
    assert of_kernel("_tile_max_kernel", given, (2, 1)) == 2 * 1000 * 2 + 2 * 8 + 3 * 64 * 4
    given = {"chosen": chosen, "logits": logits, "keys": nowhere(1, 5 * 64), "tile": 64}
    assert of_kernel("_rank_tokens_kernel", given, (1, 1)) == 5 * 8 + 5 * 64 * 2 + 5 * 64 * 8
    assert of_kernel("_rank_tiles_kernel", {"chosen": chosen, "going": best, "tiles": 64}, (1, 1)) == 5 * 8 + 5 * 64 * 4
    assert of_kernel("_fork_kv_kernel", {"tokens": logits}, (2, 1)) == 0
    with pytest.raises(KeyError):
        of_kernel("_unheard_of", {"logits": logits}, (1,))


def test_of_each_kernel_that_reads_logits_it_is_known_how_many() -> None:
    reading = set[str]()
    for name, module in kernels_of_package().items():
        types = vars(module)[name].fn.__code__.co_varnames[: vars(module)[name].fn.__code__.co_argcount]
        if "logits" in types and "temperature" in types:
            reading.add(name)
    assert reading == LOGITS_READ.keys()


def test_operations_copies_and_waits_are_told_apart() -> None:
    on_device, on_host = nowhere(4, 3), np.zeros(3, np.int64)
    with LaunchCounter() as counter:
        on_device.view(3, 4).T[None].expand(2, 4, 3)
        nowhere(5)
        torch.from_numpy(on_host) + 1
    assert (counter.operations, counter.copies, counter.waits) == ([], 0, 0)
    with LaunchCounter() as counter:
        on_device + uploaded_for_search(on_host, NOWHERE)
        on_device.int()
    assert (counter.operations, counter.copies, counter.waits) == (["add", "_to_copy"], 1, 0)


@pytest.mark.parametrize(
    "waiting",
    [
        lambda values: values.sum().item(),
        lambda values: bool(values[0] > 0),
        lambda values: values.cpu(),
        lambda values: values.tolist(),
        lambda values: torch.zeros(3, dtype=torch.int64).to(values.device),
        lambda values: values.copy_(torch.zeros(3, dtype=torch.int64)),
        lambda values: torch.tensor([1, 2, 3], device=values.device),
        lambda values: torch.as_tensor(np.arange(3), device=values.device),
    ],
    ids=["item", "bool", "cpu", "tolist", "upload", "copy", "tensor", "as tensor"],
)
def test_every_wait_is_counted(waiting: Callable[[torch.Tensor], object]) -> None:
    with LaunchCounter() as counter:
        waiting(nowhere(3))
    assert counter.waits == 1
