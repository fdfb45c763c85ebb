"""Plots of what is measured, as the papers draw it: PNG files next to the tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.peers.tridecode import PAPERS_INTERVAL

Content = dict[str, Any]


def draw_all(folder: Path) -> list[Path]:
    """Draw every plot whose table is in the folder."""
    drawn = []
    for name, (table, draw) in PLOTS.items():
        source = folder / f"{table}.json"
        if not source.exists():
            continue
        figure, axes = pyplot.subplots(figsize=(9, 4.2), layout="constrained")
        draw(axes, json.loads(source.read_text()))
        axes.grid(alpha=0.3)
        target = folder / f"{name}.png"
        figure.savefig(target, dpi=110)
        pyplot.close(figure)
        drawn.append(target)
    return drawn


def _memory_by_step(axes: Any, content: Content) -> None:
    """KV blocks in use after every step, mean over prompts, of the first attention and the longest prompts."""
    cells = content["cells"]
    of_first = [cell for cell in cells if cell["cell"][:2] == cells[0]["cell"][:2]]
    longest = max(cell["cell"][2] or 0 for cell in of_first)
    for index, cell in enumerate(cell for cell in of_first if (cell["cell"][2] or 0) == longest):
        width, color = cell["cell"][3], f"C{index}"
        axes.plot(cell["series"]["shared"], color=color, label=f"{width} beams, shared")
        axes.plot(cell["series"]["unshared"], color=color, linestyle="--", label=f"{width} beams, unshared")
    length = f"{longest} tokens" if longest else "natural length"
    axes.set(xlabel="decoding step", ylabel="KV blocks in use", title=f"KV memory, prompts of {length}")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _overlap_by_width(axes: Any, content: Content) -> None:
    """Of the first attention: heads change the bytes of a block, not who shares it."""
    lines: dict[str, list[tuple[int, float]]] = {}
    cells = content["cells"]
    for cell in (cell for cell in cells if cell["cell"][0] == cells[0]["cell"][0]):
        for row in cell["rows"]:
            own = dict(zip(content["columns"], row, strict=True))
            label = f"{own['prompts']}: {own['prompt tokens']}"
            lines.setdefault(label, []).append((own["beams"], own["overlap"]))
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set(xlabel="beams", ylabel="share of blocks saved", title="Overlap by width", ylim=(0, 1))
    axes.legend(title="prompts: their tokens", fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))


def _throughput_by_width(axes: Any, content: Content) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    first = content["cells"][0]["cell"][:3]
    for cell in content["cells"]:
        if cell["cell"][:3] == first:
            for label, samples in cell["series"].items():
                mean = sum(samples) / len(samples)
                lines.setdefault(label.removeprefix("tokens/s, "), []).append((cell["cell"][3], mean))
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set(xlabel="beams", ylabel="tokens of the answer per second", title="Speed by width", ylim=(0, None))
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _reclamation_by_step(axes: Any, content: Content) -> None:
    width = content["cells"][0]["cell"][0]
    of_interval = [cell for cell in content["cells"] if cell["cell"][0] == width and cell["cell"][2] == PAPERS_INTERVAL]
    for index, cell in enumerate(of_interval):
        whole, reclaim, name = cell["series"]["whole"], cell["series"]["reclaim"], cell["cell"][1]
        color = f"C{index}"
        axes.plot(whole, linewidth=0.5, color=color, label=f"{name}: step")
        at = [i for i, ms in enumerate(reclaim) if ms]
        axes.plot(at, [reclaim[i] for i in at], ".", color=color, label=f"{name}: reclamation in it")
    title = f"Reclamation every {PAPERS_INTERVAL} steps, {width} beams"
    axes.set(xlabel="decoding step", ylabel="ms", yscale="log", title=title)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _quality_by_speed(axes: Any, content: Content) -> None:
    families: dict[str, list[tuple[float, float]]] = {}
    for cell in content["cells"]:
        (mode,) = cell["cell"]
        families.setdefault(_family(mode), []).append(tuple(cell["series"]["point"]))
    for label, points in families.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", linestyle=":", label=label)
    axes.set(xlabel="steps per forward of the target", ylabel="mean log p of the answer", title="Speed and quality")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _front_of_widths(axes: Any, content: Content) -> None:
    """All settings of the grid, by layers of drafts, and the line through those on the front."""
    families: dict[str, list[tuple[float, float]]] = {}
    front = []
    for row in (row for cell in content["cells"] for row in cell["rows"]):
        search, layers, *_, speed, quality, on_front = row
        label = f"{search}, {layers} layers" if layers else search.rpartition(",")[0]
        families.setdefault(label, []).append((speed, quality))
        front += [(speed, quality)] if on_front else []
    for label, points in families.items():
        axes.plot(*zip(*points, strict=True), marker="o", linestyle="", label=label)
    axes.plot(*zip(*sorted(front), strict=True), color="black", linewidth=0.8, label="front")
    speed, quality = content["columns"][-3:-1]
    axes.set(xlabel=speed, ylabel=f"{quality} of the answer", title="Dynamic width: speed and quality")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _family(mode: str) -> str:
    """Of a mode's name, what it shares with its neighbours on the curve."""
    if mode.startswith("dynamic"):
        return mode.rpartition(",")[0]
    return mode.rstrip("0123456789-").rstrip(", ")


PLOTS: dict[str, tuple[str, Callable[[Any, Content], None]]] = {
    "memory_by_step": ("memory", _memory_by_step),
    "overlap_by_width": ("memory", _overlap_by_width),
    "throughput_by_width": ("throughput", _throughput_by_width),
    "reclamation_by_step": ("reclamation", _reclamation_by_step),
    "quality_by_speed": ("quality", _quality_by_speed),
    "front_of_widths": ("dsbd_grid", _front_of_widths),
}
