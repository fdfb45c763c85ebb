"""Checks that tensor-parallel ranks decide alike: each selects by itself, from equal logits, and one replies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch.distributed as dist
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group


class RanksDisagreeError(RuntimeError):
    """Ranks have decided differently, so that they no longer compute the same sequences."""


class WorkerRankCheck:
    """Compares what ranks have decided.

    Args:
        ranks: A process group of all ranks that must decide the same, with tensors on the host.
    """

    def __init__(self, ranks: dist.ProcessGroup) -> None:
        self._ranks = ranks
        self._num_ranks = dist.get_world_size(ranks)

    def compare(self, what: str, of_groups: Mapping[str, Iterable[np.ndarray]]) -> None:
        """Waits until all ranks have called it, and returns if their decisions are equal.

        Args:
            what: Names the decisions in the message.
            of_groups: Integers, by beam group.

        Raises:
            RanksDisagreeError: on all ranks, naming the groups and which ranks differ.
        """
        mine = {group_id: worker_ranks_as_text(arrays) for group_id, arrays in of_groups.items()}
        of_ranks: list[dict[str, str]] = [{}] * self._num_ranks
        dist.all_gather_object(of_ranks, mine, group=self._ranks)
        if found := disputes_of_worker_ranks(of_ranks):
            raise RanksDisagreeError(
                f"trie_beam.debug_rank_check: tensor parallel ranks disagree about the {what} of {', '.join(found)}; "
                f"this engine's further results could not be trusted, so it stops"
            )


def disputes_of_worker_ranks(of_ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """The beam groups on which ranks disagree, each with the ranks on each side."""
    found = []
    for group_id in dict.fromkeys(group_id for of_rank in of_ranks for group_id in of_rank):
        camps = defaultdict(list)
        for rank, of_rank in enumerate(of_ranks):
            camps[of_rank.get(group_id)].append(str(rank))
        if len(camps) > 1:
            sides = " against ".join(f"rank{'s' * (len(camp) > 1)} {', '.join(camp)}" for camp in camps.values())
            found.append(f"beam group {group_id!r} ({sides})")
    return found


def worker_rank_check(vllm_config: VllmConfig) -> WorkerRankCheck | None:
    """The rank check for a worker, once vLLM's process groups exist; None without tensor parallelism."""
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return None
    return WorkerRankCheck(get_tp_group().cpu_group)


def worker_ranks_as_text(arrays: Iterable[np.ndarray]) -> str:
    """Integers as text, for comparison."""
    return repr([array.tolist() for array in arrays])
