"""A step of selection on tensors without content, as on a GPU that nobody looks at.

Tensors of torch's meta device have shapes and no content: a step runs on them as on a device that the host never waits
for, in milliseconds, however large the vocabulary. Kernels of ours are noted, not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

import vllm_trie
from benchmarks import device_bytes
from benchmarks.launch_counter import LaunchCounter
from vllm_trie.messages import GroupStep
from vllm_trie.search import gumbel, sampling
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import ConstraintTrie
from vllm_trie.search.rules import SearchPhase, SearchRules
from vllm_trie.search.stop_strings import SearchStopStrings
from vllm_trie.worker import launches
from vllm_trie.worker.kv.kv_caches import KVCaches, KVTable
from vllm_trie.worker.rows.catalogs import RowCatalogs
from vllm_trie.worker.rows.rows import GroupRows, Rows
from vllm_trie.worker.runner import BeamModelRunner
from vllm_trie.worker.select import amateur, select
from vllm_trie.worker.select.amateur import SelectionAmateurLogits
from vllm_trie.worker.select.select import Selector
from vllm_trie.worker.select.selection_graphs import SelectionGraphCapture, SelectionGraphs
from vllm_trie.worker.speculation import RunnerSpeculation
from vllm_trie.worker.startup.widest_steps import most_rows_measured_together
from vllm_trie.worker.step_context import RunnerStepContext, SelectedCohort

NOWHERE = torch.device("meta")
LENGTH, BLOCK_SIZES = 64, (16, 32)  # tokens of a slot; of a block, by KV cache group
PROMPT = list(range(20))
CATALOG = "items"  # its digest
MOST_TOKENS = 1 << 20  # of a vocabulary
HOPPER = GPUTarget("cuda", 90, 32)
MOST_PROGRAMS = 65_535  # that CUDA launches in the second dimension of a grid; in the first one there may be any number


class Launches:
    """In the place of a kernel: notes that it was launched, with how many bytes, and which of its variants.

    Variants are those that Triton distinguishes.

    Args:
        kernel: Compiled or interpreted.
    """

    def __init__(self, kernel: Any) -> None:
        self.count = self.num_bytes = 0
        self._name, self._parameters = kernel.fn.__name__, kernel.arg_names
        self.variants: set[object] = set()
        self._variant_of = variants_of(kernel)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: object, **options: object) -> None:
            assert all(size <= MOST_PROGRAMS for size in grid[1:]), f"CUDA does not launch {self._name}[{grid}]"
            self.count += 1
            given = dict(zip(self._parameters, args, strict=False)) | options
            self.num_bytes += device_bytes.of_kernel(self._name, given, grid)
            self.variants.add(self._variant_of(*args, **options))

        return launch


def variants_of(kernel: Any) -> Callable[..., object]:
    """Says which variant of a kernel, compiled or interpreted, a launch with some arguments is to Triton, on Hopper."""
    compiled = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
    specialize = create_function_from_signature(compiled.signature, compiled.params, make_backend(HOPPER))

    def variant_of(*args: object, **options: object) -> object:
        _, specialization, options = specialize(*args, **options)
        return (*specialization, *sorted(options.items()))

    return variant_of


def kernels_of_package() -> dict[str, ModuleType]:
    """By name: where each kernel of ours is. What kernels call are none."""
    package = Path(vllm_trie.__file__).parent
    files = [path for path in package.rglob("*.py") if "@triton.jit" in path.read_text()]
    names = [".".join(path.relative_to(package.parent).with_suffix("").parts) for path in files]
    found = {
        name: (module, value)
        for module in map(import_module, names)
        for name, value in vars(module).items()
        if isinstance(value, JITFunction | InterpretedFunction) and value.fn.__module__ == module.__name__
    }
    called = {name for _, function in found.values() for name in function.fn.__code__.co_names}
    return {name: module for name, (module, _) in found.items() if name not in called}


@contextmanager
def kernels_noted() -> Iterator[dict[str, Launches]]:
    """Within it, kernels do the work as on a GPU, and are noted by name."""
    found = kernels_of_package()
    noted = {name: Launches(vars(module)[name]) for name, module in found.items()}
    with ExitStack() as stack:
        for name, module in found.items():
            stack.enter_context(patch.object(module, name, noted[name]))
        stack.enter_context(patch.object(launches, "worker_runs_kernels_on", lambda _: True))
        for drawing in (gumbel, sampling):  # there are no generators without content
            stack.enter_context(patch.object(drawing, "search_generator_on_device", lambda *_: None))
        yield noted


def stop_strings(strings: Sequence[str], *_: bool) -> SearchStopStrings:
    """In texts of letters, whatever the tokens."""
    return SearchStopStrings(strings, lambda tokens: "a" * len(tokens), MOST_TOKENS)


def nowhere(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor of which nobody can look at the content."""
    return torch.empty(shape, dtype=dtype, device=NOWHERE)


class Sampler:
    """vLLM's, which is not ours to count: it hands logits on, and takes tokens from nowhere.

    Args:
        num_slots: Of the runner.
        vocab_size: V.
    """

    compute_nans = False

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.penalties_state = SimpleNamespace(output_bin_counts=nowhere(num_slots, vocab_size, dtype=torch.int32))
        self.logits_processors: list[Any] = []

    def apply_sampling_params(self, logits: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return logits.float()

    def __call__(self, logits: torch.Tensor, batch: InputBatch) -> SamplerOutput:
        counts = nowhere(2, batch.num_reqs, dtype=torch.int32)
        return SamplerOutput(nowhere(batch.num_reqs, 1), None, None, *counts)


def runner_of(num_slots: int, vocab_size: int) -> Any:
    """vLLM's, as far as rows and their selection know it."""
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=nowhere(num_slots, LENGTH, dtype=torch.int32)),
        total_len=SimpleNamespace(gpu=nowhere(num_slots, dtype=torch.int32)),
        last_sampled_tokens=nowhere(num_slots, 1),
        req_id_to_index={str(slot): slot for slot in range(num_slots)},
    )
    sampler = Sampler(num_slots, vocab_size)
    of_runner = {"max_num_reqs": num_slots, "model_config": None, "req_states": states, "sampler": sampler}
    return SimpleNamespace(device=NOWHERE, **of_runner)


def batch_of(slots: np.ndarray, num_tokens: np.ndarray) -> InputBatch:
    """One token of each of R rows, which hold `num_tokens` [R] with it."""
    count = len(slots)
    starts, none_yet = np.arange(count + 1, dtype=np.int32), np.zeros(count, dtype=np.int32)
    ints = {"dtype": torch.int32}
    known: dict[str, Any] = {
        "req_ids": [str(slot) for slot in slots],
        **dict.fromkeys(("num_reqs", "num_reqs_after_padding", "num_tokens", "num_tokens_after_padding"), count),
        "num_draft_tokens": 0,
        **{name: nowhere(count) for name in ("idx_mapping", "expanded_idx_mapping")},
        "expanded_local_pos": nowhere(count, **ints),
        "idx_mapping_np": slots,
        "num_scheduled_tokens": np.ones(count, dtype=np.int32),
        "query_start_loc": nowhere(count + 1, **ints),
        "query_start_loc_np": starts,
        "seq_lens": nowhere(count, **ints),
        "seq_lens_cpu_upper_bound": torch.from_numpy(num_tokens),
        **dict.fromkeys(("num_computed_tokens_np", "prefill_len_np", "num_computed_prefill_tokens_np"), none_yet),
        "is_prefilling_np": np.zeros(count, dtype=bool),
        "has_prefill": False,
        "input_ids": nowhere(count, **ints),
        "positions": nowhere(count),
        "is_padding": nowhere(count, dtype=torch.bool),
        "logits_indices": nowhere(count),
        "cu_num_logits": nowhere(count + 1, **ints),
        "cu_num_logits_np": starts,
    }
    batch = object.__new__(InputBatch)  # versions of vLLM differ in further fields, which nobody asks for
    for field in fields(InputBatch):
        setattr(batch, field.name, known.get(field.name))
    return batch


class Amateur(amateur.SelectionAmateur):
    """A draft model, which is not ours to count.

    Args:
        vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def logits(self, _: InputBatch, places: np.ndarray, read: np.ndarray) -> SelectionAmateurLogits:
        return SelectionAmateurLogits(nowhere(len(places), self._vocab_size, dtype=torch.bfloat16), np.sort(places))


class RecordedGraphs(SelectionGraphCapture):
    """In the place of CUDA graphs: a capture notes how much it holds, and a replay launches nothing else.

    Args:
        noted: Kernels, see `kernels_noted`.

    `launches`: of each graph, how many operations and kernels it holds; `replays`: how often one was replayed.
    """

    def __init__(self, noted: Mapping[str, Launches]) -> None:
        self._noted, self.replays = noted, 0
        self.launches: list[int] = []

    def has_room(self, num_bytes: int) -> bool:
        return True

    def wait_for_copies(self) -> None:
        pass

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        before = sum(kernel.count for kernel in self._noted.values())
        with LaunchCounter() as counter:
            run()
        assert (counter.copies, counter.waits) == (0, 0), "no graph holds copies from the host, or waits for it"
        self.launches.append(len(counter.operations) + sum(own.count for own in self._noted.values()) - before)
        return self._replay

    def _replay(self) -> None:
        self.replays += 1


class WeightlessStep:
    """Groups with equal rules that have just fanned out, in one batch, each after so many ordinary rows.

    Args:
        rules: Theirs.
        num_groups: G.
        vocab_size: V.
        num_ordinary: Ordinary rows ahead of each group.
        most_children: By depth, of the catalog.
    """

    def __init__(
        self,
        rules: SearchRules,
        num_groups: int,
        vocab_size: int,
        num_ordinary: int = 0,
        most_children: tuple[int, ...] = (8, 5, 2),
    ) -> None:
        width, num_rows = rules.width, num_groups * (num_ordinary + rules.width)
        self.num_slots = 2 * num_rows
        self.runner = runner_of(self.num_slots, vocab_size)
        self.speculation: Any = RunnerSpeculation()
        rows = Rows(self.runner)
        shuffled = np.random.default_rng(0).permutation(self.num_slots)[:num_rows]
        self.slots = shuffled.reshape(num_groups, -1)
        self.logits = nowhere(num_rows, vocab_size, dtype=torch.bfloat16)
        self.amateur = Amateur(vocab_size)
        self.groups: dict[str, GroupRows] = {}
        request: Any = SimpleNamespace(prompt_token_ids=PROMPT, prompt_embeds=None)
        for number, own in enumerate(self.slots[:, num_ordinary:]):
            beams = SearchBeams(nowhere(1, width, dtype=torch.float32))
            self.groups[str(number)] = GroupRows(request, rules, [str(slot) for slot in own], beams, nowhere(width))

        catalogs, num_nodes = RowCatalogs(NOWHERE), 40
        parts = nowhere(num_nodes + 1, dtype=torch.int32), nowhere(num_nodes, dtype=torch.int32)
        catalogs.tries[CATALOG] = ConstraintTrie(*parts, nowhere(num_nodes, dtype=torch.bool), [*most_children])
        with patch.object(select, "stop_strings_of_rows", lambda _: stop_strings):
            self.selector = Selector(self.runner, self.groups, rows, catalogs, most_rows_measured_together(vocab_size))
        steps = {
            name: GroupStep(SearchPhase(), selects=True, decodes=True, sampling_key=(3, 5)) for name in self.groups
        }
        fanned_out = {"entered": [*self.groups], "new_tokens_unknown": [*self.groups]}
        self.context = RunnerStepContext(steps, decided_at=SimpleNamespace(record=lambda: None), **fanned_out)
        for group in self.groups.values():
            group.slots = rows.slots_of(group.row_ids)
            rows.write_first_tokens(group, rules.is_controlled)
        self.selector.begin(self.context)
        for group in self.groups.values():
            states = {key: nowhere(1, width) for key in self.selector.row_beams.begin(rules, None)}
            group.beams = group.beams._replace(states=states)
        tables = [KVTable(nowhere(self.num_slots, LENGTH // n, dtype=torch.int32), n) for n in BLOCK_SIZES]
        rows.kv = KVCaches([nowhere(9, 4)], 9, tables=tables)

    def use_graphs(self, capture: SelectionGraphCapture) -> None:
        """Take steps by graphs that are made so."""
        rows, logits = self.selector.rows, self.logits
        self.selector.use(SelectionGraphs(rows, logits.dtype, capture, logits.numel()))

    def batch(self, num_tokens: np.ndarray) -> InputBatch:
        """All rows; by group, `num_tokens` [G] in each."""
        return batch_of(self.slots.ravel(), num_tokens.repeat(self.slots.shape[1]))

    def select(self, num_tokens: np.ndarray) -> list[SelectedCohort]:
        """Let all groups select and reorder their rows, which hold `num_tokens` [G]."""
        plan = self.selector.plan(self.context, self.batch(num_tokens))
        of_amateur = None
        if plan.contrasts:
            of_amateur = self.amateur.of_step(self.context.steps, self.groups, plan.rows)
        return self.selector.select(self.context, plan, self.logits, nowhere(len(self.logits), 1), of_amateur)

    def sample(self, num_tokens: np.ndarray) -> SamplerOutput:
        """All that the runner does where vLLM would sample; ordinary rows get their tokens from nowhere."""
        of_runner: dict[str, Any] = {"step": self.context, "groups": self.groups, "selector": self.selector}
        of_runner |= {"amateur": self.amateur, "speculation": self.speculation}
        runner: Any = SimpleNamespace(**of_runner, max_num_reqs=self.num_slots, device=NOWHERE, rank_check=None)
        batch = self.batch(num_tokens)
        return BeamModelRunner._sample_all_rows(runner, self.runner.sampler, None, self.logits, batch)
