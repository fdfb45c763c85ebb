"""Launches of a step are counted without a GPU, and grow for no feature that is not asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.launch_counter import LaunchCounter
from benchmarks.tables.launches import SPECULATING, TABLE, counted, counted_forest
from benchmarks.weightless import NOWHERE, nowhere
from vllm_trie.search.devices import uploaded

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
MOST_OF_FOREST, MOST_WAITS_OF_FOREST = 100, 5  # of four layers, each of which is waited for; likewise
MOST_BESIDE = 4  # more where there are ordinary rows beside beams; likewise


def test_the_table_is_measured_and_no_step_waits_but_for_stop_strings(tmp_path: Path) -> None:
    assert main(["--only", "launches", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "launches.json").read_text())
    rows = [dict(zip(TABLE.columns, row, strict=True)) for cell in content["cells"] for row in cell["rows"]]
    searches = {row["search"] for row in rows}
    assert searches > {"plain", "controlled", "along a catalog", "in 2 groups of beams"}
    speculating = [row for row in rows if row["search"] == SPECULATING]
    assert [row["beams x groups"] for row in speculating] == ["4 x 1", "4 x 8"]
    for row in speculating:
        assert (row["whole step"], row["waits"]) == (MOST_OF_FOREST, MOST_WAITS_OF_FOREST)
    rows = [row for row in rows if row not in speculating]
    assert all(row["waits"] == (row["search"] == "stop strings") for row in rows), rows
    for row in rows:
        assert row["selection, in all"] < row["whole step"] < row["whole step, beside ordinary rows"], row


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
def test_ordinary_rows_beside_beams_take_few_launches_more(search: str, num_groups: int) -> None:
    alone, beside = (counted(search, 4, num_groups, num_ordinary, is_whole=True).launches for num_ordinary in (0, 3))
    assert 0 < beside - alone <= MOST_BESIDE


@pytest.mark.parametrize("num_groups", [1, 8])
def test_forests_take_no_more_launches_and_waits_than_today_however_many_there_are(num_groups: int) -> None:
    forests = counted_forest(4, num_groups)
    assert forests.launches <= MOST_OF_FOREST
    assert forests.waits <= MOST_WAITS_OF_FOREST


def test_operations_copies_and_waits_are_told_apart() -> None:
    on_device, on_host = nowhere(4, 3), np.zeros(3, np.int64)
    with LaunchCounter() as counter:
        on_device.view(3, 4).T[None].expand(2, 4, 3)
        nowhere(5)
        torch.from_numpy(on_host) + 1
    assert (counter.operations, counter.copies, counter.waits) == ([], 0, 0)
    with LaunchCounter() as counter:
        on_device + uploaded(on_host, NOWHERE)
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
