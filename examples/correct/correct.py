"""Corrects each line of a file by beams."""

import argparse
from pathlib import Path

from vllm import LLM

from vllm_trie import beam_params

PROMPT = """Wrong: The dog run fast.
Right: The dog runs fast.
Wrong: We was tired and want to sleep.
Right: We were tired and wanted to sleep.
Wrong: {}
Right:"""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--lines", type=Path, required=True, help="a file with a sentence in each line")
    arguments = parser.parse_args()

    lines = arguments.lines.read_text().splitlines()
    llm = LLM(arguments.model, additional_config={"trie_beam": {}}, kv_cache_memory_bytes=1 << 30)
    params = beam_params(beam_width=4, n=2, max_tokens=24, stop=["\n"])
    for line, output in zip(lines, llm.generate([PROMPT.format(line) for line in lines], params), strict=True):
        print(line)
        for hypothesis in output.outputs:
            per_token = hypothesis.cumulative_logprob / max(len(hypothesis.token_ids), 1)
            print(f"  {per_token:8.4f}  {hypothesis.text.strip()}")
