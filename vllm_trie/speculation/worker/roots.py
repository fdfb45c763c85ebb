"""What the host must know of rows before forests grow from them.

It already knows this of groups whose last step was verified, as it made their rows. It reads the others', in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search.devices import uploaded_together_for_search
from vllm_trie.search.step_result import SearchStepResult
from vllm_trie.speculation.worker.forest_path import AcceptedPath
from vllm_trie.worker.rows.rows import GroupRows, Rows


class ForestRoots(NamedTuple):
    """What forests grow from: the b rows of one group, on the host."""

    tables: list[np.ndarray]  # by KV cache group: [b, columns] int32, blocks up to the newest token's
    tokens: np.ndarray  # [b, n] int32, the newest tokens
    scores: np.ndarray  # [b] float32, cumulative log-probabilities; -inf where there is no beam
    compete_by: np.ndarray  # [b] float32, the scores that rank the beams
    end: int  # tokens of each row, including the newest, which is not computed


def forest_roots_of(rows: Rows, groups: Sequence[GroupRows], firsts: Sequence[int]) -> list[ForestRoots]:
    """The roots of some groups. Waits for the device, unless the host knows all of them.

    Args:
        rows: The runner's.
        groups: Which groups.
        firsts: For each, the place of the first token that must be known.
    """
    known = [_known_forest_roots(rows, *of_group) for of_group in zip(groups, firsts, strict=True)]
    asked = [place for place, roots in enumerate(known) if roots is None]
    if asked:
        found = iter(_read_forest_roots(rows, [groups[place] for place in asked], [firsts[place] for place in asked]))
    return [next(found) if roots is None else roots for roots in known]


def forest_roots_after_path(path: AcceptedPath, newest: SearchStepResult[np.ndarray]) -> ForestRoots | None:
    """The roots of a group that continues from a path with all its rows; None if it continues with one."""
    if len(newest.scores) < len(path.slots):
        return None
    compete_by = newest.scores if newest.rank_scores is None else newest.rank_scores.beams
    end = path.num_tokens + path.tokens.shape[1]
    return ForestRoots(path.tables, path.tokens.astype(np.int32), newest.scores, compete_by, end)


def _known_forest_roots(rows: Rows, group: GroupRows, first: int) -> ForestRoots | None:
    """The roots of a group from place `first` on, if the host knows all of it."""
    roots: ForestRoots | None = group.roots
    start = rows.num_computed(group)
    if roots is None or roots.end != start + 1 or first < roots.end - roots.tokens.shape[1]:
        return None
    columns = [start // block_size for block_size in rows.block_tables.block_sizes]
    if [table.shape[1] - 1 for table in roots.tables] != columns:
        return None
    return roots._replace(tokens=roots.tokens[:, first - roots.end :])


def _read_forest_roots(rows: Rows, groups: Sequence[GroupRows], firsts: Sequence[int]) -> list[ForestRoots]:
    """The roots of groups, by one copy that the host waits for."""
    tables, starts = rows.block_tables, np.array([rows.num_computed(group) for group in groups])
    columns = [starts // block_size for block_size in tables.block_sizes]  # of the newest tokens, by KV cache group
    counts, widths = starts + 1 - firsts, [len(group.slots) for group in groups]
    slots = np.concatenate([group.slots for group in groups])
    places = np.repeat(starts, widths)[:, None] + np.arange(1 - counts.max(), 1)  # right-aligned
    at, of_tokens = uploaded_together_for_search([slots, np.maximum(places, 0)], rows.device)
    held = [table.gpu[at, : last.max() + 1] for table, last in zip(tables.block_tables, columns, strict=True)]
    scores = [of_rows for group in groups for of_rows in (group.beams.scores, group.beams.compete_by)]
    parts = [*held, rows.all_tokens[at[:, None], of_tokens], *(of_rows.view(torch.int32) for of_rows in scores)]
    words = torch.cat([part.flatten() for part in parts]).cpu().numpy()
    *on_host, of_scores = np.split(words, np.cumsum([part.numel() for part in parts[: len(held) + 1]]))
    *of_tables, tokens = (part.reshape(len(slots), -1) for part in on_host)
    found, row, of_group = list[ForestRoots](), 0, of_scores.view(np.float32)
    for number, (count, width) in enumerate(zip(counts.tolist(), widths, strict=True)):
        own, end = slice(row, row + width), int(starts[number]) + 1
        blocks = [table[own, : last[number] + 1] for table, last in zip(of_tables, columns, strict=True)]
        newest, of_rows = tokens[own, tokens.shape[1] - count :], of_group[: 2 * width].reshape(2, width)
        found.append(ForestRoots(blocks, newest, of_rows[0], of_rows[1], end))
        row, of_group = row + width, of_group[2 * width :]
    return found
