"""Tiny random models that see images, and what transformers' `generate` answers with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AddedToken,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    Blip2Config,
    Blip2Processor,
    LlavaConfig,
    LlavaProcessor,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.utils import is_torchvision_available
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.support.disturb import preempt_all
from tests.support.engine import TRAINED_TARGET, Engine
from tests.support.models import COMMON
from tests.support.reference import Answer

EOS, PAD = 1, 2
LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64, "intermediate_size": 128}
PATCHES: dict[str, Any] = {"image_size": 32, "patch_size": 8, "initializer_range": 0.3}
MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


class Seeing(NamedTuple):
    """A kind of model: makes one with a tokenizer, as transformers saves it, and says what stands for an image."""

    make: Callable[[Any, Path], Any]
    placeholder: str  # "": an image comes before the text
    needs_torchvision: bool = True  # to be loaded, whatever it makes of it


def why_not(kind: str) -> str | None:
    """Why this environment cannot run a kind, if it cannot."""
    if KINDS[kind].needs_torchvision and not is_torchvision_available():
        return "vLLM does not load this model without torchvision, which vllm_trie.mend mends where pip has one"
    return None


def make_model(kind: str, folder: Path) -> Path:
    """Save one, with the trained model's tokens. What it says differs with what it sees, and often ends."""
    tokenizer = AutoTokenizer.from_pretrained(TRAINED_TARGET)
    config = KINDS[kind].make(tokenizer, folder)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "language_model" not in name and name != "lm_head.weight":
                weight += 0.2 * torch.randn_like(weight)
        model.get_output_embeddings().weight[EOS] *= 3
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS, PAD
    model.save_pretrained(folder)
    if kind == "llava":
        _name_as_published(folder / "model.safetensors")
    return folder


def _name_as_published(weights: Path) -> None:
    """Transformers 5 names a CLIP tower's weights in a shorter way than the checkpoints that vLLM takes."""
    old, new = "vision_tower.", "vision_tower.vision_model."
    renamed = {name.replace(old, new): weight for name, weight in load_file(weights).items()}
    save_file(renamed, weights, metadata={"format": "pt"})


def _blip2(tokenizer: Any, folder: Path) -> Blip2Config:
    image_token = _token(tokenizer, "<image>")
    Blip2Processor(BlipImageProcessorPil(size=_square()), tokenizer, num_query_tokens=8).save_pretrained(folder)
    text = {**COMMON, "vocab_size": len(tokenizer), "hidden_size": 128, "pad_token_id": PAD}
    return Blip2Config(
        vision_config={**LAYERS, **PATCHES},
        qformer_config={**LAYERS, "vocab_size": len(tokenizer), "encoder_hidden_size": 64, "initializer_range": 0.3},
        text_config={**text, "model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 128, "init_std": 0.3},
        num_query_tokens=8,
        image_token_index=image_token,
    )


def _llava(tokenizer: Any, folder: Path) -> LlavaConfig:
    image_token = _token(tokenizer, "<image>")
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=_square())
    counts: dict[str, Any] = {"patch_size": 8, "num_additional_image_tokens": 1}  # for a patch each, and CLIP's own
    processor = LlavaProcessor(images, tokenizer, vision_feature_select_strategy="default", **counts)
    processor.save_pretrained(folder)
    return LlavaConfig(
        vision_config={**LAYERS, **PATCHES, "model_type": "clip_vision_model", "projection_dim": 32},
        text_config={**COMMON, "model_type": "llama", "vocab_size": len(tokenizer)},
        image_token_index=image_token,
        image_seq_length=16,
        vision_feature_layer=-2,
        tie_word_embeddings=False,
    )


def _qwen2_5_vl(tokenizer: Any, folder: Path) -> Qwen2_5_VLConfig:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor

    vision = {"depth": 2, "num_heads": 2, "out_hidden_size": 128, "window_size": 32, "fullatt_block_indexes": [1]}
    return _qwen(tokenizer, folder, Qwen2_5_VLConfig, Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, vision, MROPE)


def _qwen3_vl(tokenizer: Any, folder: Path) -> Qwen3VLConfig:
    from transformers import Qwen3VLProcessor, Qwen3VLVideoProcessor

    vision = {"depth": 2, "num_heads": 2, "out_hidden_size": 128, "deepstack_visual_indexes": [0]}
    rope = {**MROPE, "mrope_interleaved": True}
    vision["num_position_embeddings"] = 16
    return _qwen(tokenizer, folder, Qwen3VLConfig, Qwen3VLProcessor, Qwen3VLVideoProcessor, vision, rope)


def _qwen(
    tokenizer: Any, folder: Path, config: Any, processor: Any, videos: Any, vision: dict[str, Any], rope: dict[str, Any]
) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    start, end, image, video = (_token(tokenizer, token) for token in VISION_TOKENS)
    sizes: dict[str, Any] = {"patch_size": 8, "size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}}
    parts = Qwen2VLImageProcessorPil(**sizes), tokenizer, videos(**sizes)
    processor(*parts, chat_template="{{ messages }}").save_pretrained(folder)
    return config(
        vision_config={**vision, "hidden_size": 64, "intermediate_size": 128, **PATCHES},
        text_config={**COMMON, "vocab_size": len(tokenizer), "hidden_size": 128, "rope_parameters": rope},
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
    )


def _token(tokenizer: Any, token: str) -> int:
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True)], special_tokens=True)
    return tokenizer.convert_tokens_to_ids(token)


def _square() -> dict[str, int]:
    return {"height": 32, "width": 32}


KINDS = {
    "blip2": Seeing(_blip2, "", needs_torchvision=False),
    "llava": Seeing(_llava, "<image>"),
    "qwen2_5_vl": Seeing(_qwen2_5_vl, QWEN_IMAGE),
    "qwen3_vl": Seeing(_qwen3_vl, QWEN_IMAGE),
}


def image(seed: int) -> Image.Image:
    """Noise, 36 pixels wide, and higher the greater the seed is, up to 64."""
    height = 40 + 8 * (seed % 4)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, 36, 3), dtype=np.uint8))


@cache
def _load(model: Path) -> Any:
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForImageTextToText.from_pretrained(model, **options).eval(), AutoProcessor.from_pretrained(model)


def transformers_answers(
    model: Path, prompt: dict[str, Any], width: int, max_tokens: int
) -> tuple[list[int], list[Answer]]:
    """The tokens of a prompt of vLLM's, with those that stand for an image, and all hypotheses, best first."""
    generator, processor = _load(model)
    images = prompt["multi_modal_data"]["image"] if "multi_modal_data" in prompt else None
    inputs = processor(text=prompt["prompt"], images=images, return_tensors="pt")
    (token_ids,) = inputs["input_ids"].tolist()
    output = generator.generate(
        **inputs,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=EOS,
        pad_token_id=PAD,
        output_scores=True,
        return_dict_in_generate=True,
    )
    answers = []
    for tokens, score in zip(output.sequences[:, len(token_ids) :].tolist(), output.sequences_scores, strict=True):
        end = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
        answers.append(Answer(tokens[:end], float(score)))
    return token_ids, answers


LONG = "import os\nimport sys\n{}\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n{}\n    d"
TEXTS = ["{}def f():\n    ", LONG, "x = {}"]


def prompts(kind: str, seed: int = 0) -> list[dict[str, Any]]:
    """Texts, with an image before them or two within."""
    placeholder, found = KINDS[kind].placeholder, []
    for number, text in enumerate(TEXTS):
        images = [image(seed + 3 * number + other) for other in range(text.count("{}") if placeholder else 1)]
        found.append({"prompt": text.replace("{}", placeholder), "multi_modal_data": {"image": images}})
    return found


def run(engine: Engine, jobs: list[tuple[dict[str, Any], SamplingParams]], preempted_at: tuple[int, ...] = ()) -> Any:
    core, finished, steps = engine.llm.llm_engine, {}, 0
    for number, (prompt, params) in enumerate(jobs):
        params = params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        core.add_request(str(number), prompt, params)
    while core.has_unfinished_requests():
        finished.update({output.request_id: output for output in core.step()})
        steps += 1
        if steps in preempted_at:
            preempt_all(engine)
    return [finished[str(number)] for number in range(len(jobs))]
