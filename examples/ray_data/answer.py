"""Answers the prompts of a JSON lines file by beams, in a stage of a Ray Data pipeline."""

import argparse
import json

import ray
import torch
from vllm import LLM

from vllm_trie import beam_params


class Searcher:
    """An engine, in an actor of its own."""

    def __init__(self, model: str, enforce_eager: bool) -> None:
        options = {"additional_config": {"trie_beam": {}}, "kv_cache_memory_bytes": 1 << 30}
        self.llm = LLM(model, enforce_eager=enforce_eager, **options)
        self.params = beam_params(beam_width=4, n=2, max_tokens=24)

    def __call__(self, batch: dict) -> dict[str, list]:
        """A row for each hypothesis, with all columns of its prompt."""
        outputs = self.llm.generate(batch["prompt"].tolist(), self.params, use_tqdm=False)
        rows = [
            {column: values[row] for column, values in batch.items()}
            | {"rank": hypothesis.index, "text": hypothesis.text, "logprob": hypothesis.cumulative_logprob}
            for row, output in enumerate(outputs)
            for hypothesis in output.outputs
        ]
        return {column: [row[column] for row in rows] for column in rows[0]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--enforce-eager", action="store_true", help="start sooner, and search slower")
    parser.add_argument("input", help='objects with a "prompt", one per line')
    parser.add_argument("output", help="a file")
    arguments = parser.parse_args()

    ray.data.DataContext.get_current().execution_options.preserve_order = True
    answers = ray.data.read_json(arguments.input, lines=True).map_batches(
        Searcher,
        fn_constructor_args=(arguments.model, arguments.enforce_eager),
        batch_size=64,
        compute=ray.data.ActorPoolStrategy(size=arguments.engines),
        num_gpus=int(torch.cuda.is_available()),
    )
    with open(arguments.output, "w") as file:
        for row in answers.iter_rows():
            file.write(json.dumps(row) + "\n")
            print(f"  {row['logprob']:8.4f}  {row['prompt']!r} {row['text']!r}")
