"""What differs between versions of vLLM is known for each supported one, and is what the installed one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import BeamSearchParams

from vllm_trie.compat import versions
from vllm_trie.compat.fingerprint import SUPPORTED_VERSIONS
from vllm_trie.compat.versions import own_vllm_beams, vllm_beams_eos_ids, vllm_beams_have_allowlist
from vllm_trie.entrypoints.server.use_beam_search import _served_as_by_vllm

EOS, OTHER_EOS, TOKEN = 1, 7, 9


def test_every_supported_version_has_its_rules() -> None:
    assert sorted(versions._OWN_BEAMS) == sorted(SUPPORTED_VERSIONS)


def test_generation_config_names_eos_tokens_where_vllms_own_beams_heed_it() -> None:
    further = {OTHER_EOS} if own_vllm_beams().stops_by_generation_config else set()
    assert vllm_beams_eos_ids({"eos_token_id": [EOS, OTHER_EOS]}, EOS) == {EOS} | further
    assert vllm_beams_eos_ids({"eos_token_id": OTHER_EOS}, None) == further
    assert vllm_beams_eos_ids({}, EOS) == {EOS}


def test_an_allowlist_is_seen_where_vllms_own_beams_have_one() -> None:
    assert not vllm_beams_have_allowlist(BeamSearchParams(2, max_tokens=4))
    assert own_vllm_beams().has_allowlist == ("allowed_token_ids" in BeamSearchParams.__struct_fields__)
    if own_vllm_beams().has_allowlist:
        assert vllm_beams_have_allowlist(BeamSearchParams(2, max_tokens=4, allowed_token_ids=[]))


@pytest.mark.parametrize("with_eos", [False, True])
def test_a_server_leaves_every_eos_token_out_unless_asked_for_it(with_eos: bool) -> None:
    ends = [("stop", None, EOS), ("stop", OTHER_EOS, OTHER_EOS), ("stop", TOKEN, TOKEN), ("stop", "x", TOKEN)]
    outputs = [
        CompletionOutput(0, "", [TOKEN, last], 0.0, None, finish_reason=finish, stop_reason=reason)
        for finish, reason, last in [*ends, ("length", None, OTHER_EOS)]
    ]
    request = RequestOutput("0", "", [], None, outputs, finished=True)
    params = BeamSearchParams(2, max_tokens=4, include_stop_str_in_output=with_eos)
    _served_as_by_vllm(request, EOS, {EOS, OTHER_EOS}, params)
    assert [one.stop_reason for one in outputs] == [EOS, OTHER_EOS, TOKEN, "x", None]
    assert [len(one.token_ids) for one in outputs] == ([2] * 5 if with_eos else [1, 1, 2, 2, 2])


def test_vllm_does_not_read_an_option_of_beams_from_other_requests() -> None:
    """Once it does, the option is one of `_COMMON_WORDS` in vllm_trie.options.request: docs/options.md says why."""
    folder = Path(vllm.__file__).parent
    sources = [folder / "sampling_params.py", *(folder / "entrypoints").rglob("*.py"), *(folder / "v1").rglob("*.py")]
    assert len(sources) > 100
    assert not [path for path in sources if "no_repeat_ngram" in path.read_text()]
