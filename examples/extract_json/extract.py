"""Extracts the fields of a schema from texts, with the share of the beams that agree on each."""

import argparse
import json
import math
from collections import Counter

from vllm import LLM
from vllm.sampling_params import StructuredOutputsParams

from vllm_trie import beam_params

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"},
        "city": {"enum": ["Lyon", "Oslo", "Porto"]},
        "works": {"type": "boolean"},
    },
    "required": ["name", "city", "works"],
    "additionalProperties": False,
}
TEXTS = [
    "Anna lives in Lyon, where she is a nurse.",
    "Old Peter left Porto for Oslo when he retired.",
]
PROMPT = """Maria lives in Oslo. She is a student and has no job.
{{"name":"Maria","city":"Oslo","works":false}}
John lives in Porto, where he drives a bus.
{{"name":"John","city":"Porto","works":true}}
{}
"""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()

    llm = LLM(
        arguments.model,
        additional_config={"trie_beam": {}},
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        kv_cache_memory_bytes=1 << 30,
    )
    params = beam_params(
        beam_width=6, n=6, max_tokens=48, length_penalty=0.0, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )
    for text, output in zip(TEXTS, llm.generate([PROMPT.format(text) for text in TEXTS], params), strict=True):
        found = [hypothesis for hypothesis in output.outputs if hypothesis.finish_reason == "stop"]
        weights = [math.exp(hypothesis.cumulative_logprob) for hypothesis in found]
        readings = [json.loads(hypothesis.text) for hypothesis in found]
        print(text)
        for field in SCHEMA["required"]:
            shares = Counter()
            for reading, weight in zip(readings, weights, strict=True):
                shares[reading[field]] += weight / sum(weights)
            values = ", ".join(f"{value!r} {share:.0%}" for value, share in shares.most_common(3))
            print(f"  {field:6} {values}")
