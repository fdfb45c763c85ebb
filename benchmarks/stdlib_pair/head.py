"""Train an EAGLE-3 head for the pair's target: `python -m benchmarks.stdlib_pair.head`. Half an hour on one core.

The head is one layer, which reads of each token its embedding and what the target computed at the token before it. It
learns on the target's corpus to predict what the target predicts; embeddings and output projection are the target's.
As in EAGLE-3 (arXiv 2503.01840), it also learns to continue from its own states, which it does after its drafts.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from benchmarks.stdlib_pair import corpus
from benchmarks.stdlib_pair.train import load, pack

HEAD = Path(__file__).with_name("head")
TARGET = Path(__file__).with_name("target")
AUX_LAYERS = (2, 5, 7)  # of the target: the head reads what comes out of them, counted from 1
SHAPE = {"num_hidden_layers": 1, "intermediate_size": 256}
CYCLES, PEAK_RATE, BATCH = (700, 300), 3e-3, 4  # steps of each cycle
DEPTH, DECAY = 3, 0.8  # drafts in a row that it learns, and what each weighs relative to the one before it


class Pairs(NamedTuple):
    """What one pass of the head computed of each token."""

    keys: Tensor  # [B, heads, T, head_dim]
    values: Tensor  # likewise
    states: Tensor  # [B, T, H], from which it continues
    logits: Tensor  # [B, T, V], of the token after it


class Head(nn.Module):
    """vLLM's `LlamaForCausalLMEagle3` of one layer, for whole sequences; parameters have their checkpoints' names.

    Slot i holds the pair of token i and the target's states at token i - 1, which are zeros for the first token.

    Args:
        target: Whose states it reads, and whose embeddings it has.
        config: The head's own.
    """

    def __init__(self, target: LlamaForCausalLM, config: LlamaConfig) -> None:
        super().__init__()
        self.config, self._target = config, [target]  # in a list, so that it is no part of the head
        hidden, eps, dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        attention = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * hidden, num_heads * dim, bias=False),
                "k_proj": nn.Linear(2 * hidden, num_kv_heads * dim, bias=False),
                "v_proj": nn.Linear(2 * hidden, num_kv_heads * dim, bias=False),
                "o_proj": nn.Linear(num_heads * dim, hidden, bias=False),
            }
        )
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        layer = {"self_attn": attention, "mlp": LlamaMLP(config), **{n: LlamaRMSNorm(hidden, eps) for n in norms}}
        self.fc = nn.Linear(len(AUX_LAYERS) * hidden, hidden, bias=False)
        self.midlayer = nn.ModuleDict(layer)
        self.norm = LlamaRMSNorm(hidden, eps)
        self._rope = [LlamaRotaryEmbedding(config)]

    @torch.no_grad()
    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, layers * H] the target's states at tokens [B, T], and [B, T, V] what it predicts."""
        (target,), states = self._target, list[Tensor]()
        layers = [target.model.layers[number - 1] for number in AUX_LAYERS]
        hooks = [layer.register_forward_hook(lambda _, __, out: states.append(out)) for layer in layers]
        logits = target(tokens).logits
        for hook in hooks:
            hook.remove()
        return torch.cat(states, -1), logits

    def first(self, states: Tensor) -> Tensor:
        """[B, T, H] what comes with each token: the target's states [B, T, layers * H] at the token before it."""
        return shifted(self.fc(states))

    def forward(self, tokens: Tensor, states_before: Tensor, before: list[Pairs]) -> Pairs:
        """One pass over tokens [B, T].

        Args:
            states_before: [B, T, H] states at the token before each: the target's, or the head's of the pass before.
            before: Earlier passes. A token sees itself in this pass, its parent in the pass before, and so on.
        """
        (target,), layer, depth = self._target, self.midlayer, len(before)
        embeds = layer["input_layernorm"](target.model.embed_tokens(tokens))
        both, attention = torch.cat([embeds, layer["hidden_norm"](states_before)], -1), layer["self_attn"]

        def heads(name: str) -> Tensor:
            return attention[name](both).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

        length, keys, values = tokens.shape[1], heads("k_proj"), heads("v_proj")
        cos_sin = self._rope[0](both, torch.arange(length)[None])
        queries, keys = apply_rotary_pos_emb(heads("q_proj"), keys, *cos_sin)
        of_keys = queries.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(of_keys, 1) for each in (keys, values))
        first = before[0] if before else Pairs(keys, values, both, both)
        hidden_from = torch.ones(length, length, dtype=torch.bool).triu(1 - depth)
        scores = (queries @ first.keys.transpose(2, 3)).masked_fill(hidden_from, -math.inf)
        chain = [(passed.keys, passed.values) for passed in before[1:]] + ([(keys, values)] if before else [])
        chain = [(shifted(k, depth - n, 2), shifted(v, depth - n, 2)) for n, (k, v) in enumerate(chain, 1)]
        own = [(queries * k).sum(-1, keepdim=True) for k, _ in chain]
        weights = (torch.cat([scores, *own], -1) / math.sqrt(self.config.head_dim)).softmax(-1)
        mixed = weights[..., :length] @ first.values
        mixed = mixed + sum(weights[..., length + n, None] * v for n, (_, v) in enumerate(chain))
        states = states_before + attention["o_proj"](mixed.transpose(1, 2).flatten(2))
        states = states + layer["mlp"](layer["post_attention_layernorm"](states))
        return Pairs(keys, values, states, target.lm_head(self.norm(states)))


def shifted(values: Tensor, by: int = 1, dim: int = 1) -> Tensor:
    """Values of as many tokens earlier; zeros for the first ones."""
    length = values.shape[dim]
    return torch.cat([torch.zeros_like(values.narrow(dim, 0, by)), values.narrow(dim, 0, length - by)], dim)


def loss_of(head: Head, tokens: Tensor) -> tuple[Tensor, list[float]]:
    """KL divergence from the target of drafts as many tokens ahead, in nats; and how often the best token is the same.

    Args:
        tokens: [B, T].
    """
    states, wanted = head.read(tokens)
    logprobs, states_before, passes = wanted.log_softmax(-1), head.first(states), list[Pairs]()
    loss, same = torch.zeros(()), list[float]()
    for depth in range(DEPTH):
        passes.append(head(tokens, states_before, passes))
        states_before, logits = shifted(passes[-1].states), passes[-1].logits
        own, theirs = logits.log_softmax(-1)[:, depth:].flatten(0, 1), logprobs[:, depth:].flatten(0, 1)
        loss = loss + DECAY**depth * nn.functional.kl_div(own, theirs, log_target=True, reduction="batchmean")
        same.append((own.argmax(-1) == theirs.argmax(-1)).float().mean().item())
    return loss, same


def train(head: Head, rows: Tensor, num_steps: int) -> None:
    """Let a head learn rows [rows, T] for one cycle."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 30, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / num_steps)))
    )
    progress = tqdm(range(num_steps), desc="head", mininterval=10)
    for _ in progress:
        loss, same = loss_of(head, rows[torch.randint(len(rows), (BATCH,))])
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}", same=" ".join(f"{share:.2f}" for share in same))


def untrained(target: LlamaForCausalLM, seed: int = 0) -> Head:
    """A head of random weights for a Llama."""
    torch.manual_seed(seed)
    head = Head(target, LlamaConfig.from_dict(target.config.to_dict() | SHAPE))
    for matrix in (parameter for parameter in head.parameters() if parameter.dim() > 1):
        nn.init.normal_(matrix, std=0.05)
    return head


def save(head: Head, folder: Path) -> None:
    """As vLLM reads it, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.to(torch.bfloat16) for name, weight in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    own = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": AUX_LAYERS}
    config = head.config.to_dict() | own | {"dtype": "bfloat16", "draft_vocab_size": head.config.vocab_size}
    del config["_name_or_path"]  # where the target lay
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_head(target: LlamaForCausalLM, folder: Path) -> Head:
    """A head that was saved."""
    head = Head(target, LlamaConfig.from_pretrained(folder))
    head.load_state_dict({name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()})
    return head.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HEAD, help="folder of the head")
    parser.add_argument("--from-cycle", type=int, default=0, help="go on with what this many cycles have made")
    args = parser.parse_args()
    tokenizer, target = PreTrainedTokenizerFast.from_pretrained(TARGET), load(TARGET)
    files = corpus.source_files()
    units = [unit for path in files if not corpus.is_held_out(path) for unit in corpus.units(path)]
    random.Random(0).shuffle(units)
    held_out = [unit for path in files if corpus.is_held_out(path) for unit in corpus.units(path)]
    rows, held_out_rows = pack(tokenizer, units)[:, :-1], pack(tokenizer, held_out)[:, :-1]
    for cycle in range(args.from_cycle, len(CYCLES)):
        torch.manual_seed(cycle)
        head = untrained(target) if cycle == 0 else load_head(target, args.out).train()
        train(head, rows, CYCLES[cycle])
        save(head, args.out)
    head = load_head(target, args.out)
    with torch.inference_mode():
        same = torch.tensor([loss_of(head, batch)[1] for batch in held_out_rows.split(BATCH)]).mean(0).tolist()
    report = {"parameters": sum(weight.numel() for weight in head.parameters()), "steps": sum(CYCLES)}
    report |= {"same_best_token_held_out": [round(share, 3) for share in same]}
    (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(report)


if __name__ == "__main__":
    main()
