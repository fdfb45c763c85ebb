"""What a JSON schema costs: beams under it against beams of as many steps without, and against vLLM's own loop."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.common import alternate, generate
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.significance import paired
from vllm_trie import beam_params
from vllm_trie.entrypoints.llm import llm_beam_search

ITEM = {"name": {"type": "string"}, "size": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}}
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 100,  # more than fit: no hypothesis ends before its length does
    "items": {"type": "object", "properties": ITEM, "required": [*ITEM], "additionalProperties": False},
}
ENGINE = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
MOST_OF_THE_LOOP = 64  # beams, for which vLLM's loop ends in reasonable time


def cells(setting: Setting) -> list[Cell]:
    widths = setting.widths or setting.pick((4,), (4, 8, 16, 64), (4, 8, 16, 64, 128))
    return [(num_prompts, width) for num_prompts in setting.pick((1,), (1, 8), (1, 8)) for width in widths]


def measure(bench: Bench, num_prompts: int, width: int) -> Measured:
    """Searches of one width, alternating; then vLLM's loop and ours in its place, likewise."""
    from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

    llm = bench.engine(**ENGINE)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in bench.prompts(num_prompts)]
    num_steps = bench.setting.max_tokens or bench.setting.pick(8, 48, 96)
    schema = StructuredOutputsParams(json=SCHEMA)
    free = beam_params(width, n=width, max_tokens=num_steps, ignore_eos=True)
    bound = beam_params(width, n=width, max_tokens=num_steps, structured_outputs=schema)
    runs = {"free": lambda: generate(llm, prompts, free), "bound": lambda: generate(llm, prompts, bound)}
    seconds = alternate(runs, bench.setting.pick(2, 9, 15))
    pairs = paired(seconds["bound"], seconds["free"])
    ms = [1000 * statistics.median(seconds[which]) / num_steps for which in ("free", "bound")]
    row = (num_prompts, width, num_steps, *ms, str(pairs.ratio))
    if num_prompts * width > MOST_OF_THE_LOOP:
        return Measured([(*row, "", "")])
    client = BeamSearchParams(beam_width=width, max_tokens=num_steps, structured_outputs=schema)
    both = {"ours": lambda: llm.beam_search(prompts, client)}
    both["theirs"] = lambda: llm_beam_search.original(llm, prompts, client)
    seconds = alternate(both, bench.setting.pick(1, 3, 5))
    times = paired(seconds["theirs"], seconds["ours"]).ratio
    return Measured([(*row, statistics.median(seconds["theirs"]), str(times))])


TABLE = Table(
    "Beams under a JSON schema",
    ("prompts", "beams", "steps", "ms a step, free", "under it", "times (95 %)", "vLLM's loop, s", "times ours (95 %)"),
    cells,
    measure,
    "free: beams without a schema, which take as many steps; vLLM's loop: under the same schema, its time against "
    "LLM.beam_search in the engine; each alternates with the other; backend xgrammar, no free whitespace",
)
