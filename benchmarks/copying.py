"""A model that copies, made by hand: two layers that find where the last four tokens stood before, and what came next.

The trained models are too small to copy. This one does what larger ones have learnt (an induction head, arXiv
2209.11895): heads of its first layer look one to four tokens back, by their positions alone; the second layer looks for
a place before which the newest tokens stand, and takes over what stands there. What does not repeat itself it makes up.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

CONTEXT = 4  # tokens that must have stood together
CODE = 42  # numbers of a token's code, of +1 and -1
HEAD, HIDDEN, THETA = 256, 1024, 1e9
# Planes of rotary positions that tell neighbours apart, and the first of those that hardly turn.
NEAR, FAR = 18, HEAD // 2 - CONTEXT // 2 * CODE
SHARP, MATCH = 12.0, 12.0  # of the heads of the first layer, and of a token that matches, in nats
COPY, MADE_UP = 16.0, 1.5  # logit of what is copied, and deviation of all logits, where nothing else speaks for a token


def copying_model(vocab_size: int, bos_token_id: int | None, eos_token_id: int | None) -> Any:
    """A Qwen2 that copies. Its codes, and what it makes up, are random, the same each time."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=CONTEXT,
        num_key_value_heads=CONTEXT,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=False,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
    )
    model, random = Qwen2ForCausalLM(config).eval(), torch.Generator().manual_seed(0)
    # Places in the hidden states: a token's own code, those of the tokens before it, and what is copied.
    *seen, copied = (slice(i * CODE, (i + 1) * CODE) for i in range(CONTEXT + 2))
    own = seen[0]

    def normed(num_codes: int) -> float:
        """What RMSNorm makes of a 1, where hidden states hold so many codes."""
        return float((HIDDEN / (num_codes * CODE)) ** 0.5)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        codes = torch.randint(0, 2, (vocab_size, CODE), generator=random) * 2.0 - 1.0
        model.model.embed_tokens.weight[:, own] = codes
        eye = torch.eye(CODE)

        first, second = (layer.self_attn for layer in model.model.layers)
        angles = THETA ** (-torch.arange(NEAR) / (HEAD // 2))
        for head, place in enumerate(seen[1:]):
            start, distance = head * HEAD, head + 1
            first.q_proj.bias[start : start + NEAR] = SHARP * (distance * angles).cos()
            first.q_proj.bias[start + HEAD // 2 :][:NEAR] = -SHARP * (distance * angles).sin()
            first.k_proj.bias[start : start + NEAR] = SHARP
            first.v_proj.weight[start : start + CODE, own] = eye / normed(1)
            first.o_proj.weight[place, start : start + CODE] = eye

        scale = (MATCH * HEAD**0.5 / CODE) ** 0.5 / normed(len(seen))
        for number, (place, before) in enumerate(pairwise(seen)):
            half, of_half = divmod(number, CONTEXT // 2)
            start = FAR + of_half * CODE + half * HEAD // 2
            second.q_proj.weight[start : start + CODE, place] = scale * eye
            second.k_proj.weight[start : start + CODE, before] = scale * eye
        second.v_proj.weight[:CODE, own] = eye / normed(len(seen))
        second.o_proj.weight[copied, :CODE] = eye

        model.lm_head.weight[:, copied] = COPY / (CODE * normed(len(seen) + 1)) * codes
        made_up = torch.randn(vocab_size, CODE, generator=random)
        model.lm_head.weight[:, own] = MADE_UP / (CODE**0.5 * normed(len(seen) + 1)) * made_up
    return model
