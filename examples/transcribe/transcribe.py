"""Transcribes a sound file by beams, and shows the best hypotheses for each of its parts.

Parts whose best hypothesis is doubtful are sampled at rising temperatures, and parts in which nobody speaks are left
out, both by the rules of faster-whisper. That is done here, by further requests: an engine answers each by itself.
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


def repeats_itself(hypothesis: CompletionOutput) -> bool:
    """Whether a text compresses too well."""
    text = hypothesis.text.strip().encode()
    return len(text) > MOST_COMPRESSION * len(zlib.compress(text))


def is_silence(best: CompletionOutput, silence: float) -> bool:
    """Whether nobody speaks: it is probable, and a part's best text is not."""
    return silence > MOST_SILENCE and logprob(best) < LEAST_LOGPROB


def is_doubtful(best: CompletionOutput, silence: float) -> bool:
    """Whether a part's best text repeats itself or is improbable, unless nobody speaks."""
    return (repeats_itself(best) or logprob(best) < LEAST_LOGPROB) and not is_silence(best, silence)


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


def transcribed(
    llm: LLM, prompts: list[dict[str, Any]], width: int, quiet: list[float]
) -> list[list[CompletionOutput]]:
    """The hypotheses of each part, best first: those of a search, or samples if that is doubtful.

    If the samples of all temperatures are doubtful, too, the best attempt counts: the likeliest whose text does not
    repeat itself, or the likeliest if all do.
    """
    outputs = llm.generate(prompts, beam_params(width, n=width, max_tokens=None))
    attempts = [[output.outputs] for output in outputs]
    suppressed = llm.model_config.try_get_generation_config().get("suppress_tokens") or []  # by beams they are anyway
    for temperature in TEMPERATURES:
        doubtful = [part for part, of_part in enumerate(attempts) if is_doubtful(of_part[-1][0], quiet[part])]
        if not doubtful:
            break
        params = SamplingParams(
            temperature=temperature,
            n=SAMPLES,
            max_tokens=None,
            min_tokens=1,
            logit_bias=dict.fromkeys(suppressed, -100.0),
            logprobs=0,
            seed=0,
        )
        outputs = llm.generate([prompts[part] for part in doubtful], params, use_tqdm=False)
        for part, output in zip(doubtful, outputs, strict=True):
            texts = {sample.text: sample for sample in output.outputs}  # several may be the same
            attempts[part].append(sorted(texts.values(), key=logprob, reverse=True))
    return [
        max(of_part, key=lambda tried: (not repeats_itself(tried[0]), logprob(tried[0])))
        if is_doubtful(of_part[-1][0], silence)
        else of_part[-1]
        for of_part, silence in zip(attempts, quiet, strict=True)
    ]


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
    found = transcribed(llm, prompts, arguments.beam_width, quiet)
    for part, silence, hypotheses in zip(parts, quiet, found, strict=True):
        print(f"from second {seconds:.1f} on")
        if is_silence(hypotheses[0], silence):
            print("  nobody speaks")
        else:
            for hypothesis in hypotheses:
                print(f"  {logprob(hypothesis):8.4f}  {hypothesis.text.strip()}")
        seconds += len(part) / rate
