"""Train the draft model again: `python -m benchmarks.smollm2.distill`. Under two hours on two cores.

The target writes text (`texts`), and the draft learns to predict, after each token of it, what the target predicts.
It begins as the target's first and last layers. Its vocabulary is what occurs most often in that text. What is made
is in a folder for work, so that an interrupted run continues after the last step that is complete.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.smollm2 import get
from benchmarks.smollm2.draft_model import LAYERS, save_layers
from benchmarks.smollm2.texts import pack, write

TAKEN_LAYERS = (0, -1)  # of the target, for the draft to begin with
DRAFT_VOCAB_SIZE = 8192
LENGTH = 256  # tokens of a row
HELD_OUT_ROWS = 64
BATCH = 8  # rows
PEAK_RATE = 1e-3
TOKENS, EPOCHS, SEED = 500_000, 4, 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smollm2.distill", description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("results/distill"), help="folder of what is made on the way")
    parser.add_argument("--out", type=Path, default=get.DRAFT_LAYERS, help="folder of the draft's layers")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="that the target writes")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="how often the draft reads them")
    parser.add_argument("--texts-alone", action="store_true", help="write the text, and end there")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    texts = args.work / f"texts-{args.tokens}.safetensors"
    if args.texts_alone:
        save_file({"rows": pack(write(get.target(), args.tokens, SEED), LENGTH)}, texts)
        return
    if not texts.exists():  # by a process of its own, whose memory is given back
        command = [sys.executable, "-m", "benchmarks.smollm2.distill", "--texts-alone"]
        subprocess.run([*command, "--work", args.work, "--tokens", str(args.tokens)], check=True)
    rows = load_file(texts)["rows"].long()
    target = LlamaForCausalLM.from_pretrained(get.target(), dtype=torch.bfloat16).eval()
    states = _kept(args.work / f"states-{args.tokens}.safetensors", target, rows)
    vocabulary = draft_vocabulary(rows, DRAFT_VOCAB_SIZE)
    draft = beginning(target)
    train(draft, target, rows[HELD_OUT_ROWS:], states[HELD_OUT_ROWS:], vocabulary, args.epochs)
    measured = agreement(draft, target, rows[:HELD_OUT_ROWS], states[:HELD_OUT_ROWS], vocabulary)
    save_layers(draft, vocabulary, args.out)
    report = {"tokens": rows.numel(), "epochs": args.epochs, "draft_vocab_size": len(vocabulary), **measured}
    (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"{args.out / LAYERS}: {report}")


def _kept(path: Path, target: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """The target's states of all rows, computed once."""
    if not path.exists():
        save_file({"states": last_states(target, rows)}, path)
    return load_file(path)["states"]


@torch.inference_mode()
def last_states(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """What the output projection sees of each token: [rows, LENGTH, hidden] bfloat16."""
    batches = tqdm(rows.split(BATCH), desc="target")
    return torch.cat([model.model(batch).last_hidden_state for batch in batches])


def draft_vocabulary(rows: torch.Tensor, size: int) -> torch.Tensor:
    """The tokens that occur most often: [size] int64, ascending."""
    counts = Counter(rows.flatten().tolist())
    return torch.tensor(sorted(token for token, _ in counts.most_common(size)))


def beginning(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """The draft before it has learnt anything, in float32: some layers of the target, and its embeddings."""
    config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": len(TAKEN_LAYERS), "dtype": "float32"})
    draft = LlamaForCausalLM(config)
    weights = {name: w for name, w in target.state_dict().items() if not name.startswith("model.layers.")}
    for number, taken in enumerate(TAKEN_LAYERS):
        weights |= {f"model.layers.{number}.{name}": w for name, w in target.model.layers[taken].state_dict().items()}
    draft.load_state_dict(weights)
    draft.model.embed_tokens.weight.requires_grad_(False)
    return draft


def train(
    draft: LlamaForCausalLM,
    target: LlamaForCausalLM,
    rows: torch.Tensor,
    states: torch.Tensor,
    vocabulary: torch.Tensor,
    epochs: int,
) -> None:
    """Let the draft's layers learn what the target predicts, among the tokens that a draft may have.

    Args:
        rows: [rows, LENGTH] tokens.
        states: [rows, LENGTH, hidden] of the target.
    """
    torch.manual_seed(SEED)
    own = [p for p in draft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    num_steps = epochs * (len(rows) // BATCH)
    warmup = max(num_steps // 20, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.02 + 0.49 * (1 + math.cos(math.pi * step / num_steps)))
    )
    head = target.lm_head.weight[vocabulary].detach()
    progress = tqdm(total=num_steps, desc="draft")
    for _ in range(epochs):
        for batch in torch.randperm(len(rows))[: len(rows) // BATCH * BATCH].split(BATCH):
            with torch.no_grad():
                wanted = (states[batch] @ head.T).float().log_softmax(-1)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = draft.model(rows[batch]).last_hidden_state.to(torch.bfloat16) @ head.T
            loss = torch.nn.functional.kl_div(
                found.float().log_softmax(-1).flatten(0, 1),
                wanted.flatten(0, 1),
                log_target=True,
                reduction="batchmean",
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(own, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.update()
            progress.set_postfix(loss=f"{loss.item():.3f}")


@torch.inference_mode()
def agreement(
    draft: LlamaForCausalLM,
    target: LlamaForCausalLM,
    rows: torch.Tensor,
    states: torch.Tensor,
    vocabulary: torch.Tensor,
) -> dict[str, float]:
    """How near the draft comes on rows that it has not seen, by token.

    Returns:
        `same_best`: how often both have the same best token; `overlap`: the sum over tokens of the lesser probability,
        which is the chance that a sampled draft is accepted; `in_vocabulary`: the target's probability of all tokens
        that a draft may have.
    """
    same, overlap, inside = 0.0, 0.0, 0.0
    for tokens, of_target in zip(rows.split(BATCH), states.split(BATCH), strict=True):
        p = (of_target @ target.lm_head.weight.T).float().softmax(-1)
        q = (draft.model(tokens).last_hidden_state @ target.lm_head.weight[vocabulary].T.float()).softmax(-1)
        same += (p.argmax(-1) == vocabulary[q.argmax(-1)]).float().sum().item()
        overlap += torch.minimum(p[..., vocabulary], q).sum().item()
        inside += p[..., vocabulary].sum().item()
    total = rows.numel()
    return {
        "same_best": round(same / total, 4),
        "overlap": round(overlap / total, 4),
        "in_vocabulary": round(inside / total, 4),
    }


if __name__ == "__main__":
    main()
