"""Train the model of the puzzle, and the network that values its partial answers: `python -m benchmarks.puzzle.train`.

The target, a Llama of 0.8 M parameters with a token per number, learns solutions that are sampled from all of them. The
network learns from what the target samples on puzzles that it has not seen: after each line, whether the answer came to
solve its puzzle. No solver helps it. Minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterable, Iterator
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.puzzle.countdown import GREATEST_RESULT, Puzzle, a_solution, is_solved, puzzles, reordered
from benchmarks.puzzle.value import NUM_LINES, features, load_value, save_value, untrained_value

FOLDER = Path(__file__).parent
BOS, EOS = "<s>", "</s>"
VOCABULARY = [BOS, EOS, "\n", " ", "=", "+", "-", "*", *map(str, range(GREATEST_RESULT + 1))]
NUM_NEW = 24  # tokens that an answer may have; a right one has 18
TARGET_STEPS, BATCH = 800, 64
VALUE_STEPS, VALUE_BATCH, PEAK_OF_VALUE = 2000, 256, 4e-3
PEAK_OF_MATRICES, PEAK_OF_OTHERS = 5e-3, 3e-3  # learning rates
IGNORED = -100
NUM_PUZZLES, NUM_ROLLOUTS = 1200, 8  # that the network learns from, per puzzle
NUM_HELD_OUT = 300


class Rollout(NamedTuple):
    """An answer that the target drew."""

    puzzle: Puzzle
    answer: str
    is_right: bool

    @property
    def parts(self) -> list[str]:
        """The answer up to the end of each line."""
        return ["".join(lines) for lines in accumulate([line] for line in self.answer.splitlines(keepends=True))]


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({token: id_ for id_, token in enumerate(VOCABULARY)}, unk_token=EOS))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d{1,2}|\D"), "isolated")
    words.decoder = decoders.Fuse()
    words.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token=BOS, eos_token=EOS, pad_token=EOS)


def untrained() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            initializer_range=0.05,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )


def learn(model: LlamaForCausalLM, losses: Iterator[torch.Tensor]) -> None:
    """Take steps on losses of the model: Muon for matrices, AdamW for all else."""
    is_matrix = {name: p.dim() == 2 and "layers" in name for name, p in model.named_parameters()}
    matrices, others = (
        [p for name, p in model.named_parameters() if is_matrix[name] == wanted] for wanted in (True, False)
    )
    optimizers = [
        torch.optim.Muon(
            matrices, lr=PEAK_OF_MATRICES, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=PEAK_OF_OTHERS, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    warmup = TARGET_STEPS // 20

    def factor(step: int) -> float:
        return min((step + 1) / warmup, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / TARGET_STEPS)))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]
    progress = tqdm(islice(losses, TARGET_STEPS), total=TARGET_STEPS, mininterval=10)
    model.train()
    for loss in progress:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in (*optimizers, *schedules):
            stepper.step()
        model.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.eval()


def losses_of_solutions(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Iterator[torch.Tensor]:
    """Mean cross-entropy of solutions, not of prompts, in nats per token."""
    given, rng = puzzles("train"), random.Random(0)
    while True:
        batch = [reordered(puzzle, rng) for puzzle in rng.choices(given, k=BATCH)]
        rows = [tokenizer(p.prompt + a_solution(p, rng) + EOS)["input_ids"] for p in batch]
        ids = torch.tensor(rows)  # all alike in length
        wanted = ids.clone()
        wanted[:, : len(tokenizer(batch[0].prompt)["input_ids"])] = IGNORED
        logits = model(ids[:, :-1]).logits
        yield cross_entropy(logits.flatten(0, 1), wanted[:, 1:].flatten(), ignore_index=IGNORED)


@torch.inference_mode()
def draw(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, given: list[Puzzle], temperature: float
) -> list[Rollout]:
    """One answer to each of these puzzles; at temperature 0 the greedy one."""
    ids = torch.tensor([tokenizer(puzzle.prompt)["input_ids"] for puzzle in given])
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, **how)
    answers = tokenizer.batch_decode(found[:, ids.shape[1] :], skip_special_tokens=True)
    return [Rollout(p, answer, is_solved(p, answer)) for p, answer in zip(given, answers, strict=True)]


def learn_value(rollouts: list[Rollout]) -> torch.nn.Sequential:
    """Let a network learn whether answers came to be right, from what it sees after each of their lines."""
    torch.manual_seed(0)
    network, (seen, are_right) = untrained_value(), examples(rollouts)
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_OF_VALUE, VALUE_STEPS)
    for _ in tqdm(range(VALUE_STEPS), mininterval=10):
        picked = torch.randint(len(seen), (VALUE_BATCH,))
        loss = binary_cross_entropy_with_logits(network(seen[picked]).squeeze(-1), are_right[picked])
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return network.eval()


def examples(rollouts: list[Rollout], lines: Iterable[int] = range(NUM_LINES)) -> tuple[torch.Tensor, torch.Tensor]:
    """What the network sees after these lines, [partial answers, features], and whether they came to be right."""
    parts = [(r.puzzle.prompt, r.parts[line], r.is_right) for r in rollouts for line in lines if line < len(r.parts)]
    seen = torch.stack([features(prompt, part) for prompt, part, _ in parts])
    return seen, torch.tensor([float(is_right) for *_, is_right in parts])


@torch.inference_mode()
def accuracies(network: torch.nn.Sequential, rollouts: list[Rollout]) -> dict[str, dict[str, float]]:
    """By line: how often the network guesses the end right, how often "unsolved" does, and the area under ROC."""
    report = {}
    for line in range(NUM_LINES):
        seen, are_right = examples(rollouts, [line])
        values, right = network(seen).squeeze(-1), are_right.bool()
        better = (values[right][:, None] - values[~right][None]).sign()
        report[f"line {line + 1}"] = {
            "partial answers": len(seen),
            "accuracy": round(((values > 0) == right).float().mean().item(), 3),
            "accuracy of always unsolved": round((~right).float().mean().item(), 3),
            "area under ROC": round((better.mean().item() + 1) / 2, 3),
        }
    return report


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for target/ and value/")
    parser.add_argument("--value-only", action="store_true", help="the target is there")
    args = parser.parse_args()
    torch.set_num_threads(1)  # so that sums are the same wherever it runs
    tokenizer = make_tokenizer()
    if not args.value_only:
        model = untrained()
        learn(model, losses_of_solutions(model, tokenizer))
        save(model, tokenizer, args.out / "target")
    target = LlamaForCausalLM.from_pretrained(args.out / "target", dtype=torch.float32).eval()
    held_out = puzzles("held out", NUM_HELD_OUT)
    greedy = draw(target, tokenizer, held_out, 0.0)
    torch.manual_seed(0)
    sampled = draw(target, tokenizer, held_out * NUM_ROLLOUTS, 1.0)
    report: dict[str, Any] = {"parameters": target.num_parameters(), "held-out puzzles": NUM_HELD_OUT}
    for name, found in (("greedy", greedy), ("sampled", sampled)):
        report[f"{name}, solved"] = round(sum(rollout.is_right for rollout in found) / len(found), 3)
    print(json.dumps(report, indent=2))

    learnt = puzzles("rollouts", NUM_PUZZLES)
    rollouts = [rollout for _ in range(NUM_ROLLOUTS) for rollout in draw(target, tokenizer, learnt, 1.0)]
    save_value(learn_value(rollouts), args.out / "value")
    report["value network"] = accuracies(load_value(args.out / "value"), sampled)
    (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
