"""Makes a stand-in for a reward model: a classifier that finds steps probable in which something is computed."""

import argparse
import random

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForSequenceClassification, AutoTokenizer

COMPUTE = ["{who} has {a} + {b} = {sum} {what}.\n", "That makes {a} * {b} = {product} {what}.\n"]
TALK = ["{who} has {a} {what} and {b} more.\n", "We are asked how many {what} {who} has.\n", "{who} likes {what}.\n"]
SEEN = [(who, what) for who in ("Tom", "Lucy", "The boy") for what in ("apples", "books", "dollars")]
HELD_OUT = [(who, what) for who in ("Nora", "My uncle") for what in ("eggs", "tickets")]
PENALTY = 1e-4  # on the weights


def steps(of: list[tuple[str, str]], count: int) -> tuple[list[str], torch.Tensor]:
    """Random steps, and 1.0 for those that compute, else 0.0."""
    chosen = [(text, 1.0) for text in random.choices(COMPUTE, k=count)]
    chosen += [(text, 0.0) for text in random.choices(TALK, k=count)]
    texts = []
    for text, _ in chosen:
        (who, what), a, b = random.choice(of), random.randint(2, 20), random.randint(2, 9)
        texts.append(text.format(who=who, what=what, a=a, b=b, sum=a + b, product=a * b))
    return texts, torch.tensor([label for _, label in chosen])


def fit(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Weights of a logistic regression. `features`: [steps, size], `labels`: [steps]."""
    weights = torch.zeros(features.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = binary_cross_entropy_with_logits(features @ weights, labels) + PENALTY * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weights.detach()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="which gets a head; nothing else of it is trained")
    parser.add_argument("folder", help="where to put the reward model")
    arguments = parser.parse_args()

    random.seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForSequenceClassification.from_pretrained(
        arguments.model, num_labels=1, pad_token_id=0, dtype=torch.float32
    )

    def features(texts: list[str]) -> torch.Tensor:
        """[texts, size], of the last token of each: what the head sees."""
        rows = [tokenizer(text).input_ids for text in texts]
        last = torch.tensor([len(row) - 1 for row in rows])
        padded = torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])  # no token sees them
        with torch.no_grad():
            return model.base_model(padded).last_hidden_state[range(len(rows)), last]

    texts, labels = steps(SEEN, 32)
    weights = fit(features(texts), labels)
    texts, labels = steps(HELD_OUT, 16)
    right = ((features(texts) @ weights > 0) == labels.bool()).float().mean().item()
    print(f"  {right:.0%} of {len(texts)} steps about other people and things are told apart")

    with torch.no_grad():
        model.score.weight[0] = weights
    model.save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
