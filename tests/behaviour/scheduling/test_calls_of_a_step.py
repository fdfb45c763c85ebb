"""How much of ours a reader meets in one step: files, functions and calls, counted."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.engine import ROOT, TRAINED_TARGET

FEW, MANY = 20, 52  # tokens: what comes with each of the steps in between is one step

COUNT = f"""
import cProfile, json, os, pstats
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams
from vllm_trie import beam_params
engine = dict(max_model_len=128, kv_cache_memory_bytes=1 << 26, enforce_eager=True, async_scheduling=True)
engine["additional_config"] = {{"trie_beam": {{}}}}
llm = LLM({str(TRAINED_TARGET)!r}, **engine)
kinds = {{"ordinary": lambda **all: SamplingParams(n=4, **all), "beams": lambda **all: beam_params(4, n=4, **all)}}
def calls(kind, tokens):
    def run():
        params = kinds[kind](max_tokens=tokens, ignore_eos=True, detokenize=False)
        llm.generate([{{"prompt_token_ids": [*range(5, 25)]}}], params, use_tqdm=False)
    run()
    profile = cProfile.Profile()
    profile.runcall(run)
    entries = pstats.Stats(profile).stats.items()
    return {{(file.split("/vllm_trie/")[1], name): of[1] for (file, _, name), of in entries if "/vllm_trie/" in file}}
found = {{}}
for kind in kinds:
    few, many = calls(kind, {FEW}), calls(kind, {MANY})
    more = {{key: count - few.get(key, 0) for key, count in many.items()}}
    often = {{key: count for key, count in more.items() if count > {MANY - FEW - 3}}}
    found[kind] = len({{file for file, _ in often}}), len(often), sum(often.values()) / {MANY - FEW}
print(json.dumps(found))
"""


def test_a_step_without_beams_meets_few_functions_and_one_with_beams_few_files() -> None:
    result = subprocess.run([sys.executable, "-c", COUNT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    num_files, num_functions, num_calls = found["ordinary"]
    assert 0 < num_files <= 7  # one of them for attention, which calls it once in each layer
    assert num_functions <= 15
    assert num_calls <= 30
    num_files, num_functions, num_calls = found["beams"]
    assert 10 < num_files <= 33
    assert num_functions <= 137
    assert num_calls < 185
