"""Completes functions by beams, with a draft model."""

import argparse

from vllm import LLM

from vllm_trie import beam_params

PROMPTS = [
    "def is_even(number):",
    "def read_lines(path):\n    with open(path) as file:",
    "import random\n\ndef roll_dice(sides):",
]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True, help="a smaller model with the same tokens")
    arguments = parser.parse_args()

    llm = LLM(
        arguments.model,
        additional_config={"trie_beam": {}},
        speculative_config={"method": "draft_model", "model": arguments.draft, "num_speculative_tokens": 4},
        kv_cache_memory_bytes=1 << 30,
    )
    params = beam_params(beam_width=4, n=3, max_tokens=24, speculation="exact", draft_width=8)
    for output in llm.generate(PROMPTS, params):
        counts = output.kv_transfer_params["trie_beam"]
        print(f"{counts['steps']} steps, {counts['steps_per_forward']:.2f} per forward:\n{output.prompt}")
        for hypothesis in output.outputs:
            print(f"  {hypothesis.cumulative_logprob:8.4f}  {hypothesis.text!r}")
