"""Draws docs/design.png with the package's own tries: `python -m benchmarks.picture`.

Four beams after four tokens of "def add(a, b": above, who continues whom; below, which KV blocks the rows hold.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from vllm_trie.trie.blocks import BlockTrie, trie_fan_out_blocks
from vllm_trie.trie.hypotheses import HypothesisTrie

TARGET = Path(__file__).resolve().parent.parent / "docs" / "design.png"
PROMPT = ("def", "add", "(", "a", ",", "b")
BLOCK_SIZE = 4
STEPS = (  # for each row: the row that it continues, and its new token
    ((0, 0, 0, 0), (")", ",", "=", ":")),
    ((0, 1, 0, 3), (":", "c", "->", "int")),
    ((0, 0, 2, 3), ("return", "\\n", "int", ")")),
    ((0, 1, 2, 2), ("a", "return", ":", "|")),
)
STOP, STOPPING_ROW = "</s>", 3
WORDS = sorted({token for _, tokens in STEPS for token in tokens} | {STOP})
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
SHARED, FINISHED, EMPTY, DEAD, LINE = "#d9d9d9", "#f2e6a7", "#ffffff", "#f7f7f7", "#555555"
BOX = {"boxstyle": "round,pad=0.02,rounding_size=0.08", "linewidth": 1}


def search() -> tuple[list[list[str]], BlockTrie, list[tuple[int, int]]]:
    """The words of each row, then of a finished hypothesis; the blocks; and the copies that the last forks made."""
    hypotheses, ids = HypothesisTrie(), count()
    blocks = BlockTrie(BLOCK_SIZE, [next(ids) for _ in range(-(-len(PROMPT) // BLOCK_SIZE))], len(PROMPT))
    for number, (continued, tokens) in enumerate(STEPS):
        parents = np.array(continued)
        if number == len(STEPS) - 1:
            (finished,) = hypotheses.finish([STOPPING_ROW], [WORDS.index(STOP)], [0.0])
        hypotheses.advance(parents, np.array([WORDS.index(token) for token in tokens]), np.zeros(len(tokens)))
        if number == 0:
            paths = np.arange(len(parents))[:, None]
            blocks.fan_out(paths, [next(ids) for _ in range(trie_fan_out_blocks(len(PROMPT), paths, BLOCK_SIZE))])
            continue
        if number > 1:
            blocks.grow([next(ids) for _ in range(blocks.blocks_to_grow())])
        blocks.fork(parents)
    tails = [blocks.row_blocks(row)[-1] for row in range(blocks.width)]
    copies = [(tails[parent], tails[row]) for row, parent in enumerate(STEPS[-1][0]) if parent != row]
    leaves = [*(~row for row in range(hypotheses.width)), finished]
    return [[WORDS[token] for token in tokens] for tokens in hypotheses.tokens(leaves)], blocks, copies


def draw(target: Path) -> None:
    """Write the picture."""
    hypotheses, blocks, copies = search()
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(10, 6.4), layout="constrained", height_ratios=(5, 4.6))
    _draw_hypotheses(above, hypotheses, blocks.width)
    _draw_blocks(below, blocks, copies)
    for axes in (above, below):
        axes.set_axis_off()
        axes.set_xlim(-0.1, 8.9)
    figure.savefig(target, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _draw_hypotheses(axes: Any, hypotheses: Sequence[Sequence[str]], width: int) -> None:
    paths = [[tuple(words[: depth + 1]) for depth in range(len(words))] for words in hypotheses]
    heights = [len(paths) - 1.0 - number for number in range(len(paths))]
    at = {
        node: _mean(height for path, height in zip(paths, heights, strict=True) if node in path)
        for path in paths
        for node in path
    }
    middle = _mean(heights)
    _box(axes, 0.0, middle, "def add(a, b", SHARED, width=1.7)
    for number, path in enumerate(paths):
        end, height = 1.7, middle
        for depth, node in enumerate(path):
            start = 2.2 + 1.25 * depth
            axes.plot((end, start), (height, at[node]), color=LINE, linewidth=1, zorder=0)
            of_leaf = COLORS[number] if number < width else FINISHED
            color = of_leaf if node is path[-1] else SHARED
            _box(axes, start, at[node], node[-1], color, width=0.8, white=color in COLORS)
            end, height = start + 0.8, at[node]
        label = f"beam in row {number}" if number < width else "finished: in the pool"
        axes.text(7.15, heights[number], label, va="center", fontsize=10)
    axes.set_ylim(-0.6, len(paths) - 0.4)
    axes.set_title("Hypothesis trie: which tokens", loc="left", fontsize=11, fontweight="bold")


def _draw_blocks(axes: Any, trie: BlockTrie, copies: Sequence[tuple[int, int]]) -> None:
    rows = [trie.row_blocks(row) for row in range(trie.width)]
    heights = [trie.width - 1.0 - row for row in range(trie.width)]
    tokens, filled = trie.num_tokens, trie.num_tokens % BLOCK_SIZE
    at: dict[int, tuple[float, float]] = {}
    for column in range(len(rows[0])):
        for block in dict.fromkeys(row[column] for row in rows):
            at[block] = (
                2.3 * column,
                _mean(height for row, height in zip(rows, heights, strict=True) if row[column] == block),
            )
    for row in rows:
        for left, right in pairwise(row):
            ends = (at[left][0] + 1.5, at[right][0]), (at[left][1], at[right][1])
            axes.plot(*ends, color=LINE, linewidth=1, zorder=0)
    for number, row in enumerate(rows):
        for column, block in enumerate(row):
            is_tail = column == len(row) - 1 and filled
            if number == rows.index(next(one for one in rows if one[column] == block)):
                _block(
                    axes, *at[block], filled if is_tail else BLOCK_SIZE, COLORS[number] if is_tail else SHARED, block
                )
        axes.text(6.35, heights[number], f"row {number}", va="center", fontsize=10, color=COLORS[number])
    for source, destination in copies:
        ends = [(at[block][0] + 1.55, at[block][1]) for block in (source, destination)]
        axes.add_patch(
            FancyArrowPatch(*ends, connectionstyle="arc3,rad=-0.5", arrowstyle="-|>", mutation_scale=12, color="k")
        )
        label = "row 3's beam died: it continues row 2.\nFull blocks by reference, the tail copied."
        axes.text(7.0, _mean(height for _, height in ends), label, va="center", fontsize=8.5)
    garbage = trie.reclaim()
    for number, block in enumerate(garbage):
        _block(axes, 2.3 * number, -1.35, BLOCK_SIZE, DEAD, block, edge="#aaaaaa")
    axes.text(2.3 * len(garbage), -1.35, "no row leads here: reclaimed later", va="center", fontsize=8.5, color=LINE)
    axes.set_ylim(-1.9, trie.width - 0.2)
    label = f"Block trie: where the KV of {tokens} tokens lies (blocks of {BLOCK_SIZE}; grey: full, held once)"
    axes.set_title(label, loc="left", fontsize=11, fontweight="bold")


def _box(axes: Any, x: float, y: float, text: str, color: str, width: float, white: bool = False) -> None:
    axes.add_patch(FancyBboxPatch((x, y - 0.28), width, 0.56, facecolor=color, edgecolor=LINE, **BOX))
    middle = x + width / 2, y
    axes.text(*middle, text, ha="center", va="center", family="monospace", fontsize=9, color="w" if white else "k")


def _block(axes: Any, x: float, y: float, filled: int, color: str, block: int, edge: str = LINE) -> None:
    """One KV block: a cell for each token, the first ones filled."""
    width = 1.5 / BLOCK_SIZE
    for cell in range(BLOCK_SIZE):
        face = color if cell < filled else EMPTY
        axes.add_patch(
            Rectangle((x + cell * width, y - 0.25), width, 0.5, facecolor=face, edgecolor=edge, linewidth=0.8)
        )
    axes.text(x + 0.75, y - 0.38, f"block {block}", ha="center", va="center", fontsize=7)


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=TARGET)
    args = parser.parse_args()
    draw(args.out)


if __name__ == "__main__":
    main()
