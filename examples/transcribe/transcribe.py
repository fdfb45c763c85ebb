"""Transcribes a sound file by beams, and shows the best hypotheses for each of its parts."""

import argparse

from transformers import AutoFeatureExtractor
from vllm import LLM
from vllm.multimodal.audio import split_audio
from vllm.multimodal.media.audio import load_audio

from vllm_trie import beam_params

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
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
    params = beam_params(arguments.beam_width, n=arguments.beam_width, max_tokens=None)
    seconds = 0.0
    for part, output in zip(parts, llm.generate(prompts, params), strict=True):
        print(f"from second {seconds:.1f} on")
        for hypothesis in output.outputs:
            per_token = hypothesis.cumulative_logprob / len(hypothesis.token_ids)
            print(f"  {per_token:8.4f}  {hypothesis.text.strip()}")
        seconds += len(part) / rate
