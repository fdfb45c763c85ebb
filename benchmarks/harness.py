"""What every table is made with: its cells, the engines they share, and the file that keeps what is measured.

A table is a list of cells; each is measured by itself and kept at once, so that an interrupted run loses one cell, and
the next one continues after the last.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks import models, puzzle
from benchmarks.common import BLOCK_SIZE, PAIR, TARGET, console, make_engine, show, stop
from benchmarks.peers.ctranslate2 import CTranslate2Search
from benchmarks.prompts import CODE, PromptSet
from benchmarks.server import Server, serving
from benchmarks.smollm2.draft_model import ARCHITECTURE, DraftInTransformers

Cell = tuple[Any, ...]  # of what JSON can hold

SIZES = ("minimal", "quick", "full")
MAX_NUM_SEQS, MAX_MODEL_LEN = 512, 2048


@dataclass(frozen=True)
class Setting:
    """What a run measures.

    Args:
        model, draft: Folders or names of a causal model and, for speculation, of its draft model.
        prompts: Sets of prompts; tables of one set take the first.
        widths: Beams, where a table compares widths; None: its own choice.
        max_tokens: To generate; None: each table's own choice.
        repeats: Alternations per timing.
        size: How many prompts, lengths and widths there are, of `SIZES`.
        dtype: Of the engine, and of transformers.
        kv_cache_gib: For KV blocks.
        catalog: The file that tables of retrieval search along; None: synthetic ones.
        prompt_tokens: Of a prompt, where users' histories are prompts; None: the table's own choice.
        model_name: What results call the model, if not by its folder; its draft likewise.
    """

    model: str = str(TARGET)
    draft: str | None = str(PAIR / "draft")
    prompts: tuple[PromptSet, ...] = (CODE,)
    widths: tuple[int, ...] | None = None
    max_tokens: int | None = None
    repeats: int = 3
    size: str = "quick"
    dtype: str = "float32"
    kv_cache_gib: float = 1.0
    catalog: str | None = None
    prompt_tokens: int | None = None
    model_name: str | None = None

    @property
    def is_toy(self) -> bool:
        """Whether it is the model that comes along, of which some tables make deeper ones."""
        return self.model == str(TARGET)

    @property
    def hears(self) -> bool:
        """Whether the model is a Whisper."""
        return not self.is_toy and models.hears(self.model)

    def pick(self, minimal: Any, quick: Any, full: Any) -> Any:
        """The one of three that fits the size of this run."""
        return (minimal, quick, full)[SIZES.index(self.size)]

    def prompt_set(self, name: str) -> PromptSet:
        """The one of that name."""
        return next(prompts for prompts in self.prompts if prompts.name == name)

    def cells_by_prompt_and_width(
        self, num_variants: int, lengths: Sequence[int | None], widths: Sequence[int]
    ) -> list[Cell]:
        """Variant of the model, set of prompts, their length (None: as they are), and width; the last one fastest."""
        variants = models.variants(self.model)[:num_variants]
        names = [prompts.name for prompts in self.prompts]
        return list(product(variants, names, lengths, self.widths or widths))

    def stated(self) -> dict[str, Any]:
        """As JSON holds it; runs that state the same can continue each other."""
        stated = asdict(self)
        shipped = {str(TARGET): "the trained target", str(PAIR / "draft"): "its draft"}
        stated["model"] = self.model_name or shipped.get(self.model, self.model)
        has_own_draft = self.model_name and self.draft
        stated["draft"] = f"{self.model_name}'s draft" if has_own_draft else shipped.get(self.draft or "", self.draft)
        return json.loads(json.dumps(stated, default=str))


class Bench:
    """A setting, and the one engine that is alive: cells that ask for the same one share it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._closing = ExitStack()
        self._folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory()))
        self._made: dict[str, str] = {}
        self._references: dict[str, Any] = {}
        self._converted: dict[str, CTranslate2Search] = {}
        self._said: set[str] = set()
        self._engine: Any = None
        self._asked: tuple[str, dict[str, Any]] | None = None
        self._serving = ExitStack()
        self._servers: dict[tuple[str, ...], Server] = {}  # by their options

    def model(self, variant: str = models.AS_IT_IS) -> str:
        """The folder of the model, of one made from it, see `models.VARIANTS`, or of the puzzle's."""
        if variant == models.AS_IT_IS:
            return self.setting.model
        if variant == models.PUZZLE:
            return str(puzzle.TARGET)
        if variant not in self._made:
            self._made[variant] = str(models.make(variant, self.setting.model, self._folder / str(len(self._made))))
        return self._made[variant]

    def file(self, name: str, write: Callable[[Path], None]) -> str:
        """A file that is written once."""
        path = self._folder / name.replace(" ", "-")
        if not path.exists():
            write(path)
        return str(path)

    def engine(self, variant: str = models.AS_IT_IS, **options: Any) -> Any:
        """An `LLM` in this process, with beams.

        Args:
            variant: Of the model.
            options: Of `LLM`, beyond `make_engine`'s.
        """
        if self._asked != (variant, options):
            self.stop_engine()
            model = self.model(variant)
            longest = min(MAX_MODEL_LEN, models.longest(model))
            limits = {"max_num_seqs": MAX_NUM_SEQS, "max_logprobs": 2 * MAX_NUM_SEQS, "max_model_len": longest}
            self._engine = make_engine(
                in_process=True,
                model=model,
                enforce_eager=True,
                kv_cache_memory_bytes=int(self.setting.kv_cache_gib * (1 << 30)),
                **limits | {"dtype": self.setting.dtype} | options,
            )
            self._asked = (variant, options)
        return self._engine

    def server(self, *options: str) -> Server:
        """A `vllm serve` of the model, in processes of its own, which runs until an engine is asked for.

        Args:
            options: Of the command, beyond those of `serving`; with --plugin if it is to have beams.
        """
        if options not in self._servers:
            if self._engine is not None:
                self.stop_engine()
            command = ("vllm", "serve", self.setting.model, "--served-model-name", "target")
            cache = str(int(self.setting.kv_cache_gib * (1 << 30)))
            engine = ("--dtype", self.setting.dtype, "--kv-cache-memory-bytes", cache)
            log = self._folder / f"server-{len(self._servers)}.log"
            server = self._serving.enter_context(serving(log, *engine, *options, command=command))
            self._servers[options] = server
        return self._servers[options]

    def engine_with_draft(self, num_layers: int, variant: str = models.AS_IT_IS, **options: Any) -> Any:
        """An `LLM` whose beams speculate, `num_layers` tokens ahead."""
        draft = {"method": "draft_model", "model": self.setting.draft, "num_speculative_tokens": num_layers}
        return self.engine(variant, speculative_config=draft, **options)

    def prompts(self, count: int, num_tokens: int | None = None, of: PromptSet | None = None) -> list[list[int]]:
        """Token ids of `count` prompts of one set, as they are or all of one length."""
        return (of or self.setting.prompts[0]).tokens(self.setting.model, count, num_tokens)

    def reference(self, variant: str = models.AS_IT_IS) -> Any:
        """The same model in transformers."""
        return self._reference(self.model(variant))

    def reference_draft(self) -> Any:
        """The draft model in transformers."""
        assert self.setting.draft is not None
        return self._reference(self.setting.draft)

    def ctranslate2(self, variant: str = models.AS_IT_IS) -> CTranslate2Search:
        """The same model in CTranslate2.

        Raises:
            ValueError: it has none.
        """
        folder = self._folder / f"ctranslate2-{len(self._converted)}"
        if variant not in self._converted:
            self._converted[variant] = CTranslate2Search(self.model(variant), folder)
        return self._converted[variant]

    def _reference(self, folder: str) -> Any:
        if folder not in self._references:
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

            device = "cuda" if torch.cuda.is_available() else "cpu"
            dtype = getattr(torch, self.setting.dtype)
            is_draft = ARCHITECTURE in (AutoConfig.from_pretrained(folder).architectures or ())
            kind = DraftInTransformers if is_draft else AutoModelForCausalLM
            reference = kind.from_pretrained(folder, dtype=dtype).eval().to(device)
            # No penalties of the model's own, and only who asks for it stops at EOS.
            reference.generation_config = GenerationConfig(pad_token_id=0)
            self._references[folder] = reference
        return self._references[folder]

    @property
    def eos_token_ids(self) -> list[int]:
        """All that end an answer, the tokenizer's first."""
        llm = self.engine()
        more = llm.model_config.try_get_generation_config().get("eos_token_id") or []
        own = more if isinstance(more, list) else [more]
        return list(dict.fromkeys([llm.get_tokenizer().eos_token_id, *own]))

    def say_once(self, text: str) -> None:
        """Tell on the terminal what holds for more than one cell."""
        if text not in self._said:
            self._said.add(text)
            console.print(text)

    def stop_engine(self) -> None:
        """Stop the engine, or the servers."""
        if self._engine is not None:
            stop(self._engine)
        self._engine = self._asked = None
        self._servers.clear()
        self._serving.close()

    def close(self) -> None:
        self.stop_engine()
        self._closing.close()


class Measured(NamedTuple):
    """What one cell gave."""

    rows: list[Cell]
    series: Mapping[str, list[float]] = MappingProxyType({})  # what plots need besides rows


@dataclass(frozen=True)
class Table:
    """One table of the results.

    Args:
        cells: What to measure, in order; cells that share an engine lie together.
        measure: One cell.
        note: What holds for all rows: settings, and what columns mean.
        needs_draft: Measured only if there is a draft model.
        is_of_speech: Measured only if the model hears, which has no other tables.
    """

    title: str
    columns: tuple[str, ...]
    cells: Callable[[Setting], Sequence[Cell]]
    measure: Callable[..., Measured]  # of the bench and what the cell holds
    note: str
    needs_draft: bool = False
    is_of_speech: bool = False


@dataclass
class Kept:
    """The JSON file of one table."""

    path: Path
    content: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, name: str, table: Table, setting: Setting, again: bool) -> Kept:
        """Go on with the file of an earlier run if it measured the same, else begin a new one."""
        path = folder / f"{name}.json"
        fresh = {
            "title": table.title,
            "note": table.note,
            "columns": list(table.columns),
            "command": command(),
            "machine": machine(setting),
            "setting": setting.stated(),
            "cells": [],
        }
        if path.exists() and not again:
            old = json.loads(path.read_text())
            same = all(old.get(key) == fresh[key] for key in ("columns", "note", "machine", "setting"))
            if same:
                kept = cls(path, old | {"command": fresh["command"]})
                kept.write()
                return kept
            console.print(f"{path} was measured with other settings or on another machine; measuring again.")
        folder.mkdir(parents=True, exist_ok=True)
        return cls(path, fresh)

    def has(self, cell: Cell) -> bool:
        return any(done["cell"] == list(cell) for done in self.content["cells"])

    def add(self, cell: Cell, measured: Measured) -> None:
        rows = [list(row) for row in measured.rows]
        self.content["cells"].append({"cell": list(cell), "rows": rows, "series": dict(measured.series)})
        self.write()

    def write(self) -> None:
        """Replace the file at once, so that an interruption leaves a whole one."""
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.content, indent=1) + "\n")
        unfinished.replace(self.path)

    @property
    def rows(self) -> list[list[Any]]:
        return [row for cell in self.content["cells"] for row in cell["rows"]]


def run(name: str, table: Table, bench: Bench, out: Path, again: bool) -> int:
    """Measure what is not kept yet of one table, and show all of it, even if interrupted.

    Returns:
        How many cells cannot be measured; the terminal shows why.
    """
    kept = Kept.open(out, name, table, bench.setting, again)
    cells = [cell for cell in table.cells(bench.setting) if not kept.has(cell)]
    num_failed = 0
    try:
        for cell in tqdm(cells, desc=name, unit="cell", leave=False):
            try:
                kept.add(cell, table.measure(bench, *cell))
            except (ValueError, RuntimeError) as error:
                num_failed += 1
                console.print(f"{name}, {', '.join(map(str, cell))}: cannot be measured: {error}")
                bench.stop_engine()  # which may be left with requests
    finally:
        if kept.rows:
            show(table.title, table.columns, kept.rows, kept.content["note"])
    return num_failed


def command() -> str:
    """This run's command, as one would type it next to its files of prompts; where results go makes no difference."""
    typed = sys.argv[1:]
    if "--out" in typed:
        at = typed.index("--out")
        typed = typed[:at] + typed[at + 2 :]
    threads = os.environ.get("OMP_NUM_THREADS")
    before = f"OMP_NUM_THREADS={threads} " if threads else ""
    named = [Path(word).name if Path(word).is_file() else word for word in typed]
    return before + shlex.join(["python", "-m", "benchmarks", *named])


def machine(setting: Setting) -> dict[str, Any]:
    """What figures depend on."""
    import vllm

    engine = f"dtype={setting.dtype}, block_size={BLOCK_SIZE}, max_num_seqs={MAX_NUM_SEQS}, enforce_eager=True"
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "engine": engine,
    }


def _processor() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
