"""Record what transformers 4 finds by group beam search, which transformers 5 no longer has.

`tests/behaviour/search/group_beams.json` holds the record, `test_beam_groups.py` next to it compares with it. To record
anew, in an environment of its own:

    python -m venv transformers4
    transformers4/bin/pip install 'transformers==4.56.2' torch
    transformers4/bin/python tools/record_group_beams.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "benchmarks" / "stdlib_pair" / "target"
RECORD = ROOT / "tests" / "behaviour" / "search" / "group_beams.json"
PROMPTS = [
    "def is_prime(number):",
    "import os\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n",
    "    for name, value in self.items():\n        if",
    '"""Return the number of',
    "x",
]
ITEMS = [(a, b, c) for a in range(262, 270) for b in range(296, 304) for c in range(320, 328)]
ITEMS += [item[:2] for item in ITEMS[::8]]  # which begin others
# Beams, groups, penalty, and further arguments of `generate`.
SEARCHES: list[tuple[int, int, float, dict[str, Any]]] = [
    (2, 2, 0.5, {}),
    (4, 2, 0.5, {}),
    (6, 3, 1.0, {"length_penalty": 0.0}),
    (4, 4, 0.3, {"early_stopping": "never"}),
    (6, 2, 0.2, {"early_stopping": True}),
    (8, 4, 5.0, {"length_penalty": 2.0}),
    (6, 3, 0.7, {"eos_token_id": None}),
    (9, 3, 0.4, {"eos_token_id": [1, 13]}),
    (8, 2, 1.5, {"eos_token_id": [1, 13], "early_stopping": True, "max_new_tokens": 9}),
    (6, 3, 0.6, {"eos_token_id": [13, 199], "early_stopping": "never", "length_penalty": 1.5}),
    (4, 2, 0.8, {"no_repeat_ngram_size": 2}),
    (6, 6, 0.9, {"min_new_tokens": 12, "length_penalty": -1.0}),
    (3, 3, 1.0, {"max_new_tokens": 1}),
    (6, 2, 0.5, {"max_new_tokens": 2, "early_stopping": True}),
    (4, 2, 0.5, {"along_items": True}),
    (6, 3, 1.0, {"along_items": True, "length_penalty": 0.0}),
    (8, 2, 3.0, {"along_items": True, "length_penalty": 2.0, "early_stopping": "never"}),
    (3, 3, 0.7, {"along_items": True, "max_new_tokens": 3}),
]


def main() -> None:
    """Search, and write what is found."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    searches = []
    for number, (beams, groups, penalty, options) in enumerate(SEARCHES):
        for prompt in PROMPTS[number % 2 :: 2]:
            tokens = tokenizer.encode(prompt).ids
            said = {"num_beams": beams, "num_beam_groups": groups, "diversity_penalty": penalty, **options}
            searches.append({"prompt": tokens, "options": said, **_found(model, tokens, {"max_new_tokens": 32} | said)})
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    lines = ",\n".join(json.dumps(search) for search in searches)
    RECORD.write_text(f'{{"versions": {json.dumps(versions)}, "searches": [\n{lines}\n]}}\n')


@torch.inference_mode()
def _found(model: Any, prompt: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """All hypotheses and their scores, and by what the model can be told from another one."""
    ids = torch.tensor([prompt])
    eos = options.get("eos_token_id", 1)
    if options.pop("along_items", False):
        options["prefix_allowed_tokens_fn"] = lambda _, tokens: _further(tuple(tokens[len(prompt) :].tolist()), eos)
    model.generation_config.eos_token_id = eos
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_return_sequences=options["num_beams"],
        output_scores=True,
        return_dict_in_generate=True,
        do_sample=False,
        **options,
    )
    stops = eos if isinstance(eos, list) else [eos]
    answers = []
    for tokens in output.sequences[:, len(prompt) :].tolist():
        end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
        answers.append(tokens[: end + 1])
    logits = model(ids).logits[0, -1]
    return {
        "token_ids": answers,
        "scores": [round(score, 6) for score in output.sequences_scores.tolist()],
        "logits": [round(value, 4) for value in (logits.max().item(), logits.min().item(), logits.sum().item())],
    }


def _further(tokens: tuple[int, ...], eos: int) -> list[int]:
    """How items continue after these tokens, and what ends one."""
    ways = {item[len(tokens)] for item in ITEMS if len(item) > len(tokens) and item[: len(tokens)] == tokens}
    return sorted(ways | ({eos} if tokens in ITEMS else set())) or [eos]


if __name__ == "__main__":
    main()
