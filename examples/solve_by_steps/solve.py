"""Solves problems step by step; a reward model decides which steps continue."""

import argparse

from vllm import LLM

from vllm_trie import StepCandidate, beam_params

PROMPT = """Question: Tom has 3 apples and buys 4 bags of 5 apples. How many apples has he?
The bags have 4 * 5 = 20 apples.
He has 3 + 20 = 23 apples.
Answer: 23

Question: {}
"""
QUESTIONS = [
    "Anna has 12 eggs. She eats 3 and sells the others for 2 dollars each. How many dollars does she get?",
    "A bus has 40 seats. 25 people get on, later 6 get off. How many seats are free?",
]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--reward-model", required=True, help="a classifier, or a reward model")
    parser.add_argument("--step-tag", help="what the reward model expects to find after each step")
    arguments = parser.parse_args()

    reward_model = LLM(arguments.reward_model, runner="pooling", kv_cache_memory_bytes=1 << 28)

    def tagged(candidates: list[StepCandidate]) -> list[float]:
        """The reward model's last number for each candidate, with the tag after its steps."""
        texts = [c.prompt + "".join(step + arguments.step_tag for step in c.steps) for c in candidates]
        outputs = reward_model.encode(texts, pooling_task=reward_model.pooling_task, use_tqdm=False)
        return [output.outputs.data.flatten()[-1].item() for output in outputs]

    llm = LLM(arguments.model, additional_config={"trie_beam": {}}, kv_cache_memory_bytes=1 << 30)
    scorer = reward_model if arguments.step_tag is None else tagged
    steps = {"unit": "step", "step_stop": ["\n"], "scorer": scorer, "candidates": 4, "max_steps": 4}
    params = beam_params(beam_width=2, n=2, **steps, stop=["\n\n"], temperature=0.8, max_tokens=96, seed=0)
    for question, output in zip(QUESTIONS, llm.generate([PROMPT.format(q) for q in QUESTIONS], params), strict=True):
        print(question)
        step_scores = output.kv_transfer_params["trie_beam"]["step_scores"]
        for hypothesis, scores in zip(output.outputs, step_scores, strict=True):
            print(f"  {' '.join(f'{score:.3f}' for score in scores)}  {hypothesis.text!r}")
