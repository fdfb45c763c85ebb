"""CTranslate2, an engine in C++ with a beam search of its own: it takes batches of prompts, and does not serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

COMPUTE_TYPE = "float32"  # of what CPUs have there (float32, int8 and the like) the one that every engine has


class CTranslate2Search:
    """A causal model in CTranslate2.

    Args:
        model: Folder of the model, as transformers reads it.
        folder: For what it is converted to; taken as it is if it is there.

    Raises:
        ValueError: it is not installed, or has no converter for this model.
    """

    def __init__(self, model: str, folder: Path) -> None:
        try:
            import ctranslate2
        except ImportError as error:
            raise ValueError("CTranslate2 is not installed (pip install ctranslate2)") from error
        from transformers import AutoTokenizer

        if not folder.exists():
            ctranslate2.converters.TransformersConverter(model).convert(str(folder))
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._generator = ctranslate2.Generator(
            str(folder), device="cpu", compute_type=COMPUTE_TYPE, inter_threads=1, intra_threads=threads()
        )

    def search(
        self, prompts: Sequence[Sequence[int]], width: int, num_tokens: int, n: int = 1
    ) -> list[list[list[int]]]:
        """The n best hypotheses of each prompt, all of `num_tokens` tokens, best first: [prompts][n][num_tokens]."""
        found = self._generator.generate_batch(
            [self._tokenizer.convert_ids_to_tokens(prompt) for prompt in prompts],
            beam_size=width,
            num_hypotheses=n,
            min_length=num_tokens,  # no answer ends before
            max_length=num_tokens,
            length_penalty=1.0,
            include_prompt_in_result=False,
        )
        return [result.sequences_ids for result in found]


def threads() -> int:
    """As many as torch has, which the other peers run on."""
    import torch

    return torch.get_num_threads()
