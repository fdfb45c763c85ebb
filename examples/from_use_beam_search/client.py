"""What a client of `use_beam_search` sends, and what it may send besides."""

import argparse

from openai import OpenAI

PROMPT = "def is_even(number):"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", required=True, help="as the server calls it")
    arguments = parser.parse_args()

    client = OpenAI(base_url=f"{arguments.url}/v1", api_key="none")
    request = {"model": arguments.model, "prompt": PROMPT, "max_tokens": 24}

    print("as before: n is the width, and all come back")
    before = client.completions.create(**request, n=4, extra_body={"use_beam_search": True})
    for choice in before.choices:
        print(f"  {choice.text!r}")

    print("with a stop string, which vLLM's own beams ignore")
    stopped = client.completions.create(**request, n=4, stop=["\n\n"], extra_body={"use_beam_search": True})
    for choice in stopped.choices:
        print(f"  {choice.finish_reason:6}  {choice.text!r}")

    print("8 beams, of which the best 2 come back, by the rules of transformers")
    wide = client.completions.create(**request, n=2, logprobs=0, extra_body={"vllm_xargs": {"beam_width": 8}})
    for choice in wide.choices:
        print(f"  {sum(choice.logprobs.token_logprobs):8.4f}  {choice.text!r}")

    print("as a stream: a token comes when all beams agree on it")
    parts = client.completions.create(**request, stream=True, extra_body={"vllm_xargs": {"beam_width": 4}})
    print("  " + " | ".join(repr(part.choices[0].text) for part in parts if part.choices))
