"""Train the tiny pair (target and draft) on the Python standard library: `python -m benchmarks.stdlib_pair.train`.

A byte-level BPE tokenizer of 2,048 tokens, a Llama of 3.1 M parameters trained on every file but the held-out ones,
and a draft an eighth of its size that learns on the same files to predict what the target predicts. About an
hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.stdlib_pair import corpus

BOS, EOS = "<s>", "</s>"
VOCAB_SIZE = 2048
CONTEXT = 512
SHAPES: dict[str, dict[str, int]] = {
    "target": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 7,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "draft": {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
}
CYCLES = {"target": ((1500, 3e-3),), "draft": ((800, 6e-3), (900, 4e-3))}  # steps, peak learning rate
BATCH = 8
Loss = Callable[[LlamaForCausalLM, torch.Tensor], torch.Tensor]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=EOS)


def pack(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """BOS unit EOS BOS unit EOS ... cut into rows of CONTEXT + 1 tokens: [rows, CONTEXT + 1]."""
    ids = [t for unit in tokenizer(texts)["input_ids"] for t in (*unit, tokenizer.eos_token_id)]
    rows = (len(ids) - 1) // CONTEXT
    return torch.tensor([ids[r * CONTEXT : r * CONTEXT + CONTEXT + 1] for r in range(rows)])


def own_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def divergence_from(target: LlamaForCausalLM, model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """KL divergence of what `model` predicts from what `target` predicts, in nats per token."""
    with torch.no_grad():
        wanted = target(batch[:, :-1]).logits.log_softmax(-1).flatten(0, 1)
    own = model(batch[:, :-1]).logits.log_softmax(-1).flatten(0, 1)
    return torch.nn.functional.kl_div(own, wanted, log_target=True, reduction="batchmean")


def untrained(role: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            initializer_range=0.05,
            bos_token_id=0,
            eos_token_id=1,
            **SHAPES[role],
        )
    )


def train(role: str, cycle: int, model: LlamaForCausalLM, rows: torch.Tensor, loss_of: Loss) -> LlamaForCausalLM:
    """Let a model learn `rows` [rows, CONTEXT + 1], by a loss of itself and a batch of them, for one cycle."""
    torch.manual_seed(cycle)
    steps, peak = CYCLES[role][cycle]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    parameters = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(parameters, lr=peak, betas=(0.9, 0.95))
    warmup = steps // 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    order: list[int] = []
    progress = tqdm(range(steps), desc=role)
    for _ in progress:
        if len(order) < BATCH:
            order += torch.randperm(len(rows)).tolist()
        batch, order = rows[order[:BATCH]], order[BATCH:]
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}")
    return model.eval()


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Mean cross-entropy in nats per token over all held-out rows."""
    return sum(own_loss(model, rows[i : i + 1]).item() for i in range(len(rows))) / len(rows)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for target/ and draft/")
    parser.add_argument("--only", choices=SHAPES, help="train this one; the other, and the tokenizer, are there")
    parser.add_argument("--from-cycle", type=int, default=0, help="go on with what this many cycles have made")
    args = parser.parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)

    files = corpus.source_files()
    held_out = [path for path in files if corpus.is_held_out(path)]
    (out / "held_out.txt").write_text("".join(f"{path.as_posix()}\n" for path in held_out))
    training_units = [unit for path in files if not corpus.is_held_out(path) for unit in corpus.units(path)]
    held_out_units = [unit for path in held_out for unit in corpus.units(path)]
    random.Random(0).shuffle(training_units)

    if args.only:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "target")
    else:
        tokenizer = train_tokenizer(training_units)
    rows, held_out_rows = pack(tokenizer, training_units), pack(tokenizer, held_out_units)
    print(
        f"{len(files)} files, {len(held_out)} held out; {rows.numel():,} training tokens, "
        f"{held_out_rows.numel():,} held-out tokens"
    )
    report = {"training_tokens": rows.numel(), "held_out_tokens": held_out_rows.numel()}
    for role in SHAPES:
        if args.only not in (None, role):
            continue
        loss_of = own_loss if role == "target" else partial(divergence_from, load(out / "target"))
        for cycle in range(args.from_cycle, len(CYCLES[role])):
            model = untrained(role) if cycle == 0 else load(out / role)
            save(train(role, cycle, model.train(), rows, loss_of), tokenizer, out / role)
    for role, model in ((role, load(out / role)) for role in SHAPES):
        loss = held_out_loss(model, held_out_rows)
        report[role] = {"parameters": model.num_parameters(), "held_out_loss": round(loss, 4)}
        print(f"{role}: {model.num_parameters():,} parameters, held-out loss {loss:.4f} nats per token")
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
