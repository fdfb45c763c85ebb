"""Asks a server for the items of its catalog that fit, then measures how long many such requests take."""

import argparse
import asyncio
import time

from openai import AsyncOpenAI

QUESTIONS = ["When it rains, I take", "To cut bread, you need", "To sleep well, I need"]


async def find(client: AsyncOpenAI, arguments: argparse.Namespace, question: str) -> list[tuple[int, float]]:
    """Ids of the best items and their log-probabilities, best first."""
    options = {"beam_width": arguments.beam_width, "catalog": arguments.catalog, "compact": 1, "length_penalty": 0.0}
    answer = await client.completions.create(
        model=arguments.model, prompt=question, max_tokens=16, extra_body={"vllm_xargs": options}
    )
    found = answer.kv_transfer_params["trie_beam"]
    return list(zip(found["item_ids"], found["cumulative_logprobs"], strict=True))


async def main(arguments: argparse.Namespace) -> None:
    client = AsyncOpenAI(base_url=f"{arguments.url}/v1", api_key="none")
    for question in QUESTIONS:
        print(question)
        for item_id, logprob in (await find(client, arguments, question))[:3]:
            print(f"  {logprob:8.4f}  item {item_id}")

    seconds, slots = [], asyncio.Semaphore(16)

    async def timed(question: str) -> None:
        async with slots:
            start = time.perf_counter()
            await find(client, arguments, question)
            seconds.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*(timed(QUESTIONS[number % len(QUESTIONS)]) for number in range(arguments.requests)))
    if seconds:
        seconds.sort()
        rate, median = len(seconds) / (time.perf_counter() - start), seconds[len(seconds) // 2]
        print(f"{len(seconds)} requests: {rate:.1f} a second, median {median:.3f} s, slowest {seconds[-1]:.3f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", required=True, help="as the server calls it")
    parser.add_argument("--catalog", required=True, help="as the server calls it")
    parser.add_argument("--beam-width", type=int, default=10)
    parser.add_argument("--requests", type=int, default=0, help="how many to measure")
    asyncio.run(main(parser.parse_args()))
