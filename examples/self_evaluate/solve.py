"""Solves problems step by step; the model itself says which steps are right (Xie et al. 2023, arXiv 2305.00633)."""

import argparse
import math

from vllm import LLM, SamplingParams

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
EVALUATION = "\nIs the last step (A) correct or (B) incorrect? The last step is ("


class SelfEvaluation:
    """Scores a chain of steps by `weight * log likelihood + (1 - weight) * log faithfulness`, the log of equation 4.

    Both are products over the steps. The likelihood of a step is the model's; its faithfulness is the probability of
    "A" after the question whether it is correct. One request asks for both.
    """

    def __init__(self, llm: LLM, weight: float) -> None:
        self.llm, self.weight, self.tokenizer = llm, weight, llm.get_tokenizer()
        self.question = self.tokenizer.encode(EVALUATION, add_special_tokens=False)
        self.yes = self.tokenizer.encode("A", add_special_tokens=False)[0]
        self.params = SamplingParams(max_tokens=1, prompt_logprobs=0, logprob_token_ids=[self.yes], detokenize=False)
        self.faithfulness: dict[tuple[str, str], float] = {}  # its log, by prompt and text

    def __call__(self, candidates: list[StepCandidate]) -> list[float]:
        prompts = [self.tokenizer.encode(candidate.prompt) for candidate in candidates]
        asked = [[*p, *c.token_ids, *self.question] for p, c in zip(prompts, candidates, strict=True)]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in asked], self.params, use_tqdm=False)
        scores = []
        for candidate, prompt, output in zip(candidates, prompts, outputs, strict=True):
            places = range(len(prompt), len(prompt) + len(candidate.token_ids))
            tokens = zip(candidate.token_ids, (output.prompt_logprobs[place] for place in places), strict=True)
            likelihood = sum(logprobs[token].logprob for token, logprobs in tokens)
            faithfulness = output.outputs[0].logprobs[0][self.yes].logprob
            faithfulness += self.faithfulness.get((candidate.prompt, "".join(candidate.steps[:-1])), 0.0)
            self.faithfulness[candidate.prompt, candidate.text] = faithfulness
            scores.append(self.weight * likelihood + (1 - self.weight) * faithfulness)
        return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--weight", type=float, default=0.5, help="of the likelihood, the paper's lambda: 0 to 1")
    arguments = parser.parse_args()

    llm = LLM(arguments.model, additional_config={"trie_beam": {}}, kv_cache_memory_bytes=1 << 30)
    scorer = SelfEvaluation(llm, arguments.weight)
    steps = {"unit": "step", "step_stop": ["\n"], "scorer": scorer, "candidates": 4, "max_steps": 4}
    params = beam_params(beam_width=2, n=2, **steps, stop=["\n\n"], temperature=0.8, max_tokens=96, seed=0)
    for question in QUESTIONS:  # one at a time, as the scorer's `generate` takes all that the engine answers meanwhile
        (output,) = llm.generate(PROMPT.format(question), params)
        print(question)
        for hypothesis, score in zip(output.outputs, output.kv_transfer_params["trie_beam"]["scores"], strict=True):
            faithfulness = math.exp(scorer.faithfulness[output.prompt, hypothesis.text])
            print(f"  {score:8.3f}  faithful {faithfulness:.1e}  {hypothesis.text!r}")
