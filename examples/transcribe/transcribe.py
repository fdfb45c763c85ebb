"""Transcribes a sound file by beams, and shows the best hypotheses for each of its parts.

Parts whose best hypothesis is doubtful are sampled at rising temperatures, and parts in which nobody speaks are empty,
as in faster-whisper. That is done here, by further requests: an engine answers each request by itself.
"""

import argparse
import math
import zlib
from typing import Any

from transformers import AutoFeatureExtractor
from vllm import LLM, CompletionOutput, SamplingParams
from vllm.multimodal.audio import split_audio
from vllm.multimodal.media.audio import load_audio

from vllm_trie import beam_params

# The defaults of OpenAI's Whisper and of faster-whisper.
TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)
MOST_COMPRESSION = 2.4  # a text that compresses better repeats itself
LEAST_LOGPROB = -1.0  # per token
MOST_SILENCE = 0.6  # probability that nobody speaks
SAMPLES = 5  # at each temperature
SILENCE = ("<|nospeech|>", "<|nocaptions|>")  # Whisper's mark of it, in its newer and older tokenizers


def logprob(hypothesis: CompletionOutput) -> float:
    """Per token."""
    return hypothesis.cumulative_logprob / max(len(hypothesis.token_ids), 1)


def is_doubtful(hypothesis: CompletionOutput) -> bool:
    """Whether a text repeats itself, or is improbable."""
    text = hypothesis.text.encode()
    return len(text) > MOST_COMPRESSION * len(zlib.compress(text)) or logprob(hypothesis) < LEAST_LOGPROB


def silences(llm: LLM, heard: list[dict[str, Any]], start: int) -> list[float]:
    """The probability that nobody speaks, of each part: that of its mark right after the start of a text."""
    vocabulary = llm.get_tokenizer().get_vocab()
    mark = next((vocabulary[name] for name in SILENCE if name in vocabulary), None)
    if mark is None:
        return [0.0] * len(heard)
    prompts = [{"encoder_prompt": part, "decoder_prompt": {"prompt_token_ids": [start]}} for part in heard]
    params = SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=[mark])
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [math.exp(output.outputs[0].logprobs[0][mark].logprob) for output in outputs]


def transcribed(llm: LLM, prompts: list[dict[str, Any]], width: int) -> list[list[CompletionOutput]]:
    """The hypotheses of each part, best first: those of a search, or the last samples if that is doubtful."""
    outputs = llm.generate(prompts, beam_params(width, n=width, max_tokens=None))
    found = [output.outputs for output in outputs]
    for temperature in TEMPERATURES:
        again = [number for number, hypotheses in enumerate(found) if is_doubtful(hypotheses[0])]
        if not again:
            break
        params = SamplingParams(temperature=temperature, n=SAMPLES, max_tokens=None, logprobs=0, seed=0)
        outputs = llm.generate([prompts[number] for number in again], params, use_tqdm=False)
        for number, output in zip(again, outputs, strict=True):
            texts = {sample.text: sample for sample in output.outputs}  # several may be the same
            found[number] = sorted(texts.values(), key=logprob, reverse=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="a multilingual Whisper")
    parser.add_argument("--language", default="en")
    parser.add_argument("--beam-width", type=int, default=5)
    parser.add_argument("sound", help="WAV, FLAC, MP3, Ogg, ...")
    arguments = parser.parse_args()

    ears = AutoFeatureExtractor.from_pretrained(arguments.model)
    sound, rate = load_audio(arguments.sound, sr=ears.sampling_rate)
    # What is longer than the model hears at a time is cut where it is quiet, as vLLM's server does.
    parts = split_audio(sound, rate, ears.chunk_length, overlap_duration_s=1.0, min_energy_window_size=1600)

    llm = LLM(arguments.model, additional_config={"trie_beam": {}}, kv_cache_memory_bytes=1 << 30)
    marks = ["<|startoftranscript|>", f"<|{arguments.language}|>", "<|transcribe|>", "<|notimestamps|>"]
    start = {"prompt_token_ids": llm.get_tokenizer().convert_tokens_to_ids(marks)}
    heard = [{"prompt": "", "multi_modal_data": {"audio": (part, rate)}} for part in parts]
    prompts = [{"encoder_prompt": part, "decoder_prompt": start} for part in heard]
    seconds, quiet = 0.0, silences(llm, heard, start["prompt_token_ids"][0])
    for part, silence, hypotheses in zip(parts, quiet, transcribed(llm, prompts, arguments.beam_width), strict=True):
        print(f"from second {seconds:.1f} on")
        if silence > MOST_SILENCE and logprob(hypotheses[0]) < LEAST_LOGPROB:
            print("  nobody speaks")
            hypotheses = []
        for hypothesis in hypotheses:
            print(f"  {logprob(hypothesis):8.4f}  {hypothesis.text.strip()}")
        seconds += len(part) / rate
