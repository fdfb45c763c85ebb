"""docs/models.md, made of what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.architectures.formats import FORMATS
from benchmarks.architectures.models import BY_NAME

ROOT = Path(__file__).resolve().parents[2]
MEASURED = Path(__file__).with_name("measured.json")
DOCUMENT = ROOT / "docs" / "models.md"
PROMPTS = 3

HEAD = """# Models

This page is for those who choose a model: which architectures and which
[number formats](#number-formats-and-quantisation) beam search was tested on, and what the tests found.

Published weights of these models were not tested here. Each architecture is a tiny model with random weights, in
{dtype}, on a CPU. An engine with beams answers three prompts, of 5, 31 and 70 tokens, with 4 beams and 40 tokens, once
with `ignore_eos` and once without. These are 6 searches with 24 hypotheses. transformers'
`generate(num_beams=4, num_return_sequences=4, early_stopping=False, length_penalty=1.0)` answers the same prompts with
the same model.

- "Equal": hypotheses with the same tokens at the same rank.
- "Ties": other hypotheses, whose scores differ by less than 1e-5, as rounding can cause.
- "Worst difference": the largest difference of two scores (log-probability per token) at the same rank, divided by
  transformers' score if that is below -1.
- "Speculation": how many of 12 hypotheses equal those of plain steps in the same engine, near-ties included, and the
  search steps per forward pass. The model is its own draft model (3 layers, 8 drafts in each).
  - "By n-grams": vLLM has a draft head of its own for this model.
  - "Plain steps": some of the model's layers have no kernel for draft trees.
  - "Refused": the model has recurrent states.
- "Notes": if hypotheses differ, or scores by more than 1e-4, how many of 12 hypotheses of `LLM.beam_search` equal those
  of vLLM's own client loop, and how many of 3 greedy answers of vLLM equal transformers'.

`make models` runs these tests and writes this page. It measures what benchmarks/architectures/measured.json lacks.
`python -m benchmarks.architectures --only Llama GPTQ --again` measures some rows again, and `--table` only writes the
page.

Measured with {versions}.

{counts}
"""

FORMATS_HEAD = """
## Number formats and quantisation

This is the tiny Llama in other formats than {dtype}. Its weights are quantised by rounding. `LLM.beam_search` answers
the same prompts in an engine with beams, and in one without, where vLLM's own client loop runs.

- "Equal", "ties" and "worst difference" are as above, but compare with vLLM's own loop instead of transformers. The
  scores of this loop are per token of prompt and hypothesis.
- "Forced" is the largest difference between a hypothesis' log-probability per new token and the one that the engine
  without beams gives to the same tokens as part of a prompt.
- Equal log-probabilities are common in 16 bits, and vLLM does not define which of them comes first. In these tests its
  loop gets them in the order of tokens, which is [our order](semantics.md).

Measured with {versions}, on a CPU with {cpus}.

"""
FOOT = """
## What is refused, and what needs an option

- Recurrent states (Mamba-2, gated delta nets): searches do not speculate ([serving](serving.md#models)).
- Short convolutions (LFM2): beams run, but nothing shows that they are right. On a CPU, vLLM's own answers of LFM2
  differ from transformers', and depend on how many requests compute them.
- Chunked local attention (Llama-4): needs `disable_hybrid_kv_cache_manager=True`.
- Latent attention (DeepSeek) on a CPU: it is wrong in vLLM itself with `enforce_eager=True`. Leave that out, or pass
  `compilation_config={"custom_ops": ["-rotary_embedding"]}`.
- Gated delta nets (Qwen3-Next, Qwen3.5) on a CPU: vLLM's kernel takes only bfloat16. For this page a kernel in torch,
  in float32, replaces it.
- KV caches other than full, sliding-window, latent and cross attention and recurrent states: refused by name.
"""
OUTCOMES = {
    "equal": "all hypotheses are those of transformers",
    "as vLLM": "beams differ from transformers and are those of vLLM's own client loop",
    "unsteady": "vLLM's own answers depend on how many requests compute them, so there is nothing to compare with",
    "differs": "beams differ from both",
    "refused": "refused",
    "does not run in vLLM": "vLLM itself does not run it on a CPU",
    "no answer": "the engine starts and fails",
    "failed": "not measured",
}


def read() -> dict[str, Any]:
    """What was measured: {"architectures": [row, ...], "formats": [row, ...]}."""
    measured = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    return {"architectures": [], "formats": [], **measured}


def document(content: dict[str, Any]) -> str:
    """The page.

    Args:
        content: As `read` returns it.
    """
    rows, formats = content["architectures"], content["formats"]
    found = [verdict(row) for row in rows]
    counts = [f"- {found.count(key)}: {meaning}" for key, meaning in OUTCOMES.items() if key in found]
    dtype = _all(rows, lambda row: row.get("dtype", "float32"))
    head = HEAD.format(
        dtype=dtype,
        versions=_all(rows, _versions),
        counts=f"Of {len(rows)} architectures:\n\n" + "\n".join(counts) + _missing({row["name"] for row in rows}),
    )
    cpus = _all([row for row in formats if "cpu" in row], lambda row: row["cpu"])
    formats_head = FORMATS_HEAD.format(dtype=dtype, versions=_all(formats, _versions), cpus=cpus)
    columns = ("architecture", "models", "KV caches", "equal", "ties", "worst difference", "speculation", "notes")
    of_formats = (
        "format",
        "of what",
        "options of the engine",
        "equal",
        "ties",
        "worst difference",
        "forced",
        "notes",
    )
    tables = _table(columns, map(_cells, rows)), _table(of_formats, map(_cells_of_format, formats))
    return head + "\n" + tables[0] + formats_head + tables[1] + FOOT


def _missing(measured: set[str]) -> str:
    names = ", ".join(name for name in BY_NAME if name not in measured)
    return f"\n\nOn the command's list, and not measured yet: {names}." if names else ""


def verdict(row: dict[str, Any]) -> str:
    """Which of `OUTCOMES` a row is."""
    if row["outcome"] != "compared":
        return row["outcome"]
    if row["equal"] + row["tied"] == row["hypotheses"]:
        return "equal"
    own = row.get("vllm")
    if own and own["equal"] + own["tied"] == own["hypotheses"]:
        return "as vLLM"
    return "differs" if row.get("steady", PROMPTS) == PROMPTS else "unsteady"


def _cells(row: dict[str, Any]) -> list[str]:
    architecture = BY_NAME[row["name"]]
    notes = [architecture.note] if architecture.note else []
    if row["outcome"] != "compared":
        notes.insert(0, f"{OUTCOMES[row['outcome']]}: {row['error']}")
        return [row["name"], architecture.examples, *"–" * 5, "; ".join(notes)]
    if "vllm" in row:
        own = row["vllm"]
        notes.append(f"{own['equal'] + own['tied']} of {own['hypotheses']} hypotheses as vLLM's own loop")
        notes.append(f"greedy: {row['greedy']} of {PROMPTS} as transformers")
        if row.get("steady", PROMPTS) < PROMPTS:
            notes.append(f"greedy token by token: {row['steady']} of {PROMPTS} as in one request")
        if "ours_off" in row:
            off = f"ours {row['ours_off']:.0e}, transformers' {row['transformers_off']:.0e}"
            notes.append(f"scores off one forward of transformers: {off}")
    if row.get("runs", "").startswith("Transformers"):
        notes.append("vLLM's Transformers backend")
    equal = f"{row['equal']} of {row['hypotheses']}"
    caches, worst = ", ".join(row["caches"]), f"{row['worst']:.0e}"
    cells = [row["name"], architecture.examples, caches, equal, str(row["tied"]), worst]
    return [*cells, _speculation(row.get("speculation", {"outcome": "not measured"})), "; ".join(notes)]


def _speculation(found: dict[str, Any]) -> str:
    if found["outcome"] != "compared":
        return "refused" if "error" in found else found["outcome"]
    equal = found["equal"] + found["tied"]
    by = ", by n-grams" if found.get("drafts") == "ngram" else ""
    return f"{equal} of {found['hypotheses']}, {found['steps_per_forward']:.1f} steps{by}"


def _cells_of_format(row: dict[str, Any]) -> list[str]:
    tried = next(one for one in FORMATS if one.name == row["name"])
    options = ", ".join(f'{option}="{value}"' for option, value in tried.engine.items())
    if row["outcome"] != "compared":
        note = f"{OUTCOMES[row['outcome']]}: {row['error']}"
        return [row["name"], tried.examples, f"`{options}`", "–", "–", "–", "–", note]
    equal = f"{row['equal']} of {row['hypotheses']}"
    numbers = [equal, str(row["tied"]), f"{row['worst']:.0e}", f"{row['forced']:.0e}"]
    return [row["name"], tried.examples, f"`{options}`", *numbers, tried.note]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"{_line(cells)}\n" for cells in (columns, ["---"] * len(columns), *rows))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _all(rows: list[dict[str, Any]], of: Any) -> str:
    return "; ".join(dict.fromkeys(map(of, rows)))


def _versions(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {is_}" for name, is_ in row["versions"].items())
