"""Selected, the plugin takes an engine over; installed but not selected, it leaves vLLM alone."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from vllm import envs
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tests.support import forks
from tests.support.engine import ROOT, TRAINED_TARGET
from vllm_trie.compat import fingerprint
from vllm_trie.compat.patch import VLLMPatchError
from vllm_trie.compat.sources import VLLMSources, installed_vllm
from vllm_trie.supported_engines import has_beams, why_without_beams

pytestmark = pytest.mark.slow

TRAINED_DRAFT = TRAINED_TARGET.with_name("draft")

CONFIGURE = f"""
from vllm.engine.arg_utils import EngineArgs
config = EngineArgs({str(TRAINED_TARGET)!r}).create_engine_config()
"""

STOCK = """
import importlib
from vllm_trie.compat.fingerprint import compare_installed_vllm
def modules():
    for listed in compare_installed_vllm().same:
        module, name = listed.split(":")
        target = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        target = target.fget if isinstance(target, property) else target
        target = target.__wrapped__ if hasattr(target, "cache_clear") else target
        yield listed, target.__module__ if isinstance(target, type) else target.__globals__["__name__"]
ours = [name for name, module in modules() if module.startswith("vllm_trie")]
"""

SELECTED = """
assert config.scheduler_config.scheduler_cls == "vllm_trie.engine.scheduler.AsyncBeamScheduler"
assert config.parallel_config.worker_cls == "vllm_trie.worker.cpu_worker.BeamCPUWorker"
assert config.scheduler_config.async_scheduling and config.use_v2_model_runner
"""


# What an engine loads only where somebody needs it, in `vllm_trie`.
OUTSIDE = "speculation", "step_search", "reranking", "batch", "trace", "mend"
OF_SERVERS = "entrypoints.server", "entrypoints.async_llm", "entrypoints.requests.reading"
OF_GPUS = (
    *("worker.gpu_worker", "worker.kernels", "worker.startup", "worker.kv.copies"),
    *(f"worker.select.{name}" for name in ("by_kernels", "graph_tables", "selection_graphs")),
    *(f"worker.attention.{name}" for name in ("gpu_backend", "prefix_suffix", "triton_kernels")),
)
OF_CPUS = "worker.cpu_worker", "worker.cpu", "worker.attention.cpu_backend", "worker.attention.compiled"
OF_FEW = (
    *(f"worker.cpu.{name}" for name in ("draft_inputs", "ngram", "rejection", "cached_states", "mamba")),
    *("worker.pipeline", "worker.rank_check", "worker.select.amateur", "search.string_matcher"),
    *(
        f"search.strategies.{name}"
        for name in ("joint_sampling", "in_groups", "sampled", "stochastic", "boosted", "own_stops")
    ),
    *(f"search.constraints.{name}" for name in ("contrast", "ngrams", "phrase_boosts", "suppression", "timestamps")),
    *(f"entrypoints.requests.{name}" for name in ("catalogs", "grammars", "item_sets", "phrases")),
    *("catalog.catalog", "detokenizing", "trie.encoder_blocks", "trie.traced"),
)
MOST_MODULES = 125

LOADED = """
import sys
def loaded(names):
    return [own for own in sys.modules if any((own + ".").startswith(f"vllm_trie.{name}.") for name in names)]
"""


def python(code: str, plugins: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
    environment.pop("VLLM_PLUGINS", None)
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    return subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)


def succeed(code: str, plugins: str | None = None) -> None:
    result = python(code, plugins)
    assert result.returncode == 0, result.stderr[-3000:]


def refused(code: str) -> str:
    result = python(code)
    assert result.returncode != 0, "it was not refused"
    return result.stderr.strip().splitlines()[-1]


def test_installed_it_leaves_vllm_untouched_until_an_engine_selects_it() -> None:
    succeed(
        "from vllm_trie.plugin import register; register(); register()"
        + CONFIGURE
        + STOCK
        + """
assert config.scheduler_config.scheduler_cls is None
assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
assert not config.scheduler_config.async_scheduling and not config.use_v2_model_runner
# Those that decide about selection; they have just handed the call on.
assert {name.split(".")[-1] for name in ours} == {
    "create_engine_config", "add_cli_args", "from_cli_args",
    "use_v2_model_runner", "_validate_v2_model_runner", "check_and_update_config",
}, ours
"""
        + CONFIGURE.replace(").create", ", additional_config={'trie_beam': {'reclaim_interval': 3}}).create")
        + SELECTED
    )


@pytest.mark.nightly
def test_not_even_loaded_if_vllm_plugins_names_others() -> None:
    succeed(CONFIGURE + STOCK + "assert ours == [], ours", plugins="lora_hf_hub_resolver")


@pytest.mark.nightly
def test_an_engine_loads_nothing_that_it_does_not_need() -> None:
    succeed(f"""{LOADED}
import os
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM
from vllm_trie import beam_params
engine = dict(max_model_len=64, kv_cache_memory_bytes=1 << 26, enforce_eager=True)
engine["additional_config"] = {{"trie_beam": {{}}}}
llm = LLM({str(TRAINED_TARGET)!r}, **engine)
(output,) = llm.generate([{{"prompt_token_ids": [5, 6, 7]}}], beam_params(2, n=2, max_tokens=3), use_tqdm=False)
assert len(output.outputs) == 2
for unneeded in {(OUTSIDE, OF_SERVERS, OF_GPUS, OF_FEW)}:
    assert not loaded(unneeded), loaded(unneeded)
ours = [name for name in sys.modules if name.startswith("vllm_trie")]
assert len(ours) <= {MOST_MODULES}, sorted(ours)
traced = beam_params(2, trace=True, max_tokens=3)
llm.generate([{{"prompt_token_ids": [5, 6, 7]}}], traced, use_tqdm=False)
assert {{name.split(".")[1] for name in loaded({OUTSIDE})}} == {{"trace"}}
""")


NO_TRITON = "import sys; sys.modules['triton'] = None\n"


def test_on_a_cpu_what_drafts_needs_no_triton() -> None:
    succeed(f"""{NO_TRITON}
import vllm_trie.worker.cpu_worker
from vllm_trie.worker.cpu.replace import replacements_on_cpu
from vllm_trie.speculation.worker.tree_speculation import DRAFTERS
assert replacements_on_cpu() and DRAFTERS
""")


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_on_a_cpu_without_triton_an_engine_drafts(method: str) -> None:
    succeed(f"""{NO_TRITON}
import os
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM
from vllm_trie import beam_params
engine = dict(max_model_len=64, kv_cache_memory_bytes=1 << 26, enforce_eager=True)
engine["speculative_config"] = {({"ngram": NGRAM, "draft_model": DRAFTING})[method]}
llm = LLM({str(TRAINED_TARGET)!r}, additional_config={{"trie_beam": {{}}}}, **engine)
ways = [beam_params(2, n=2, max_tokens=8, speculation=way) for way in ("exact", "off")]
drafted, plain = llm.generate([{{"prompt_token_ids": [5, 6, 7, 5, 6, 7]}}] * 2, ways, use_tqdm=False)
assert "steps_per_forward" in drafted.kv_transfer_params["trie_beam"]
assert [one.token_ids for one in drafted.outputs] == [one.token_ids for one in plain.outputs]
""")


@pytest.mark.parametrize("name", sorted({*OUTSIDE, *OF_SERVERS, *OF_GPUS, *OF_CPUS, *OF_FEW}))
def test_what_an_engine_may_do_without_is_there(name: str) -> None:
    assert find_spec(f"vllm_trie.{name}") is not None


@pytest.mark.nightly
def test_workers_of_gpus_load_nothing_of_cpus() -> None:
    succeed(f"""{LOADED}
import vllm_trie.worker.gpu_worker
import vllm_trie.worker.attention.gpu_backend
assert loaded({OF_GPUS}) and not loaded({OF_CPUS}), loaded({OF_CPUS})
""")


@pytest.mark.nightly
def test_a_server_is_wrapped_whatever_was_made_before_it_in_its_process() -> None:
    succeed(f"""
import pkgutil
from importlib import import_module
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm_trie import entrypoints, plugin
from vllm_trie.compat.patch import VLLMWrapper
def unwrapped():
    found = pkgutil.walk_packages(entrypoints.__path__, "vllm_trie.entrypoints.")
    modules = [import_module(module.name) for module in found if not module.name.endswith(".llm_engine_step")]
    wrappers = [wrapper for module in modules for wrapper in vars(module).values() if isinstance(wrapper, VLLMWrapper)]
    return {{patch.owner for wrapper in wrappers for patch in wrapper.patches if not patch.is_applied}}
plugin.register()
def configure(usage_context):
    EngineArgs({str(TRAINED_TARGET)!r}, additional_config={{"trie_beam": {{}}}}).create_engine_config(usage_context)
configure(UsageContext.LLM_CLASS)
assert any("AsyncLLM" in owner for owner in unwrapped())
configure(UsageContext.OPENAI_API_SERVER)
assert not unwrapped(), unwrapped()
""")


DRAFTING = {"method": "draft_model", "model": str(TRAINED_DRAFT), "num_speculative_tokens": 3}


def drafting(**changed: object) -> dict[str, object]:
    return {"speculative_config": {**DRAFTING, **changed}}


def several_connectors(*names: str) -> dict[str, Any]:
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in ("ExampleConnector", *names)]
    extra = {"connectors": children}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


STARTS, STARTS_SYNC = "vllm_trie.engine.scheduler.AsyncBeamScheduler", "vllm_trie.engine.scheduler.BeamScheduler"
STARTS_EITHER = "BeamScheduler"
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
ENGINES: list[tuple[dict, str]] = [  # options, and what comes of them where VLLM_PLUGINS=trie_beam selects
    ({}, STARTS),
    ({"async_scheduling": True}, STARTS),
    ({"async_scheduling": False}, STARTS_SYNC),
    ({"enable_prompt_embeds": True}, STARTS),
    (
        {"watermark_config": {"algorithm": "gumbel", "key": 1}},
        "trie_beam does not support watermark_config on a CPU without Triton; start vLLM without it",
    ),
    ({"additional_config": {"trie_beam": {"reclaim_intervall": 1}}}, "did you mean reclaim_interval"),
    ({"additional_config": {"trie-beam": {}}}, "unknown key 'trie-beam' in additional_config; did you mean"),
    ({"scheduler_cls": "mine.Scheduler"}, "scheduler_cls='mine.Scheduler' and trie_beam exclude each other"),
    ({"worker_cls": "mine.Worker"}, "worker_cls='mine.Worker' and trie_beam exclude each other"),
    (
        {"ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}},
        "trie_beam does not support ec_transfer_config (encoders elsewhere); start vLLM without it",
    ),
    ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, STARTS),
    ({"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}}, STARTS),
    (
        {"kv_transfer_config": several_connectors("OffloadingConnector"), "speculative_config": NGRAM},
        "does not support kv_transfer_config with OffloadingConnector together with speculative_config; start vLLM",
    ),
    (
        {"kv_transfer_config": several_connectors("ExampleConnector"), "speculative_config": NGRAM},
        STARTS_EITHER,
    ),
    (
        {"kv_transfer_config": several_connectors("ExampleHiddenStatesConnector")},
        "trie_beam does not support kv_transfer_config with ExampleHiddenStatesConnector, which saves hidden states of",
    ),
    (
        {"additional_config": {"routed": 1}},
        "trie_beam does not support enable_return_routed_experts; start vLLM without it or without the plugin",
    ),
    ({"pipeline_parallel_size": 2}, STARTS),
    (
        drafting() | {"pipeline_parallel_size": 2},
        "does not support pipeline_parallel_size > 1 together with speculative_config; start vLLM without it or",
    ),
    (
        {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
        "does not support distributed_executor_backend='external_launcher' with several ranks; start vLLM without",
    ),
    ({"max_num_seqs": 64, "max_num_scheduled_tokens": 16}, "max_num_scheduled_tokens=16 below max_num_seqs=64"),
    ({"speculative_config": NGRAM}, STARTS_EITHER),  # vLLM 0.33 schedules n-grams ahead, 0.32 does not
    ({"speculative_config": NGRAM | {"method": "ngram_gpu"}}, STARTS),
    (
        {"speculative_config": NGRAM, "additional_config": {"trie_beam": {"speculation": "sample"}}},
        'trie_beam.speculation="sample" needs a draft model, by whose distribution drafts are accepted, and this',
    ),
    ({"speculative_config": NGRAM, "additional_config": {"trie_beam": {"do_sample": True}}}, STARTS_EITHER),
    (
        {"speculative_config": NGRAM, "additional_config": {"method": "suffix"}},
        'does not support speculative_config with method=\'suffix\' (use "draft_model", "eagle3" or "ngram"); start',
    ),
    *(
        (
            {"speculative_config": NGRAM, "additional_config": {"method": method}},
            f"does not support speculative_config with method={method!r}, wh",
        )
        for method in ("eagle", "mtp", "dflash")
    ),
    (drafting(), STARTS),
    (drafting(method=None) | {"async_scheduling": False}, STARTS_SYNC),
    (
        drafting(rejection_sample_method="block"),
        "trie_beam does not support rejection_sample_method on a CPU without Triton; start vLLM without it",
    ),
    (drafting(num_speculative_tokens=31) | {"block_size": 32}, STARTS),
    (drafting() | {"additional_config": {"trie_beam": {"speculation": "sample"}}}, STARTS),
    ({"additional_config": {"trie_beam": {"do_sample": True}}}, STARTS),
    (
        {"additional_config": {"trie_beam": {"speculation": "exact"}}},
        'trie_beam.speculation="exact" needs drafts; start the engine with speculative_config=',
    ),
    (
        drafting(num_speculative_tokens=32) | {"block_size": 32},
        "trie_beam does not support num_speculative_tokens=32 with block_size=32 (use fewer",
    ),
    (drafting(num_speculative_tokens=200), "num_speculative_tokens=200 with block_size="),
    (drafting(parallel_drafting=True), "trie_beam does not support parallel_drafting; start vLLM without it or"),
    (drafting(use_heterogeneous_vocab=True), "does not support use_heterogeneous_vocab; start vLLM without it or"),
    (drafting(disable_padded_drafter_batch=True), "support disable_padded_drafter_batch; start vLLM without it or"),
    (
        drafting() | {"additional_config": {"adaptive": 1}},
        "does not support enable_adaptive_verification; start vLLM without it or",
    ),
    (
        drafting(num_speculative_tokens_per_batch_size=[[1, 4, 3], [5, 8, 1]]),
        "does not support num_speculative_tokens_per_batch_size; start vLLM without it or",
    ),
    (drafting(draft_sample_method="probabilistic"), "not support draft_sample_method on a CPU without Triton; start"),
    (drafting() | {"enable_lora": True}, "support enable_lora together with speculative_config; start vLLM without"),
]
CONFIGURE_EACH = f"""
import json
from vllm.engine.arg_utils import EngineArgs
from vllm_trie.supported_engines import refuse_engine_without_beams
for options in OPTIONS["engines"]:
    try:
        config = EngineArgs({str(TRAINED_TARGET)!r}, **options).create_engine_config()
        if "adaptive" in options.get("additional_config", ()):  # V1 refuses it when it makes the configuration
            config.speculative_config.enable_adaptive_verification = True
            refuse_engine_without_beams(config)
        if "routed" in options.get("additional_config", ()):  # of which only some models tell
            config.aux_output_config.enable_return_routed_experts = True
            refuse_engine_without_beams(config)
        if "method" in options.get("additional_config", ()):  # of which there is no model here
            config.speculative_config.method = options["additional_config"]["method"]
            refuse_engine_without_beams(config)
        print(json.dumps(config.scheduler_config.scheduler_cls))
    except ValueError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What comes of each engine of `ENGINES`; one process configures them all."""
    script, engines = tmp_path_factory.mktemp("engines") / "configure.py", [options for options, _ in ENGINES]
    script.write_text(CONFIGURE_EACH.replace("OPTIONS", repr({"engines": engines})))
    result = forks.run([str(script)], 300, VLLM_PLUGINS="trie_beam")
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith('"')]


@pytest.mark.parametrize("index", range(len(ENGINES)), ids=lambda index: str(ENGINES[index][0])[:60])
def test_engines_with_these_options_start_or_say_what_cannot_work(outcomes: list[str], index: int) -> None:
    assert ENGINES[index][1] in outcomes[index]


SELECTING: dict[str, Any] = {"additional_config": {"trie_beam": {}}}


def with_states(random_model: Callable[[str], Path], **options: Any) -> VllmConfig:
    """The configuration of an engine whose model has recurrent states."""
    options = {"skip_tokenizer_init": True, **SELECTING, **options}
    return EngineArgs(str(random_model("granite4")), **options).create_engine_config()


def test_a_model_that_cannot_have_beams_is_served_without_them(
    random_model: Callable[[str], Path], warned: list[str]
) -> None:
    config = with_states(random_model, runner="pooling")
    assert config.scheduler_config.scheduler_cls is None
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert not has_beams(config)
    feature = "runner='pooling'"
    assert warned == [f"trie_beam does not support {feature}: this engine runs without beams"]
    assert why_without_beams(config) == f"with {feature}, which trie_beam does not support"


@pytest.mark.parametrize(("options", "mode"), [({}, "align"), ({"enable_prefix_caching": False}, "none")])
def test_prefixes_of_models_with_states_are_cached_unless_told_otherwise(
    random_model: Callable[[str], Path], warned: list[str], options: dict[str, Any], mode: str
) -> None:
    config = with_states(random_model, **options)
    assert has_beams(config)
    assert config.cache_config.mamba_cache_mode == mode
    assert warned == []


@pytest.mark.parametrize(("custom_ops", "is_wrong"), [([], True), (["-rotary_embedding"], False)])
def test_attention_that_vllm_computes_wrongly_is_warned_of(
    random_model: Callable[[str], Path], warned: list[str], custom_ops: list[str], is_wrong: bool
) -> None:
    options: dict[str, Any] = {"enforce_eager": True, "compilation_config": {"custom_ops": custom_ops}}
    model = str(random_model("deepseek_v2"))
    EngineArgs(model, skip_tokenizer_init=True, **SELECTING, **options).create_engine_config()
    assert any("computes latent attention incorrectly on a CPU" in text for text in warned) == is_wrong


@pytest.mark.parametrize("more", [{}, {"data_parallel_start_rank": 2, "data_parallel_size": 4}, {"runner": "pooling"}])
def test_what_vllm_infers_is_inferred_once(random_model: Callable[[str], Path], more: dict[str, Any]) -> None:
    options = {"data_parallel_size": 2, "data_parallel_size_local": 2, "skip_tokenizer_init": True} | more
    stock = EngineArgs(str(random_model("granite4")), **options).create_engine_config()
    ours = with_states(random_model, **options)
    for inferred in ("data_parallel_rank", "data_parallel_external_lb", "data_parallel_hybrid_lb"):
        assert getattr(ours.parallel_config, inferred) == getattr(stock.parallel_config, inferred)
    assert ours.cache_config.enable_prefix_caching == stock.cache_config.enable_prefix_caching


def test_models_with_states_do_not_speculate(random_model: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="not support speculative_config on a model with recurrent states; start vLLM"):
        with_states(random_model, speculative_config=NGRAM)


def test_models_with_states_have_no_connector(random_model: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="not support kv_transfer_config on a model with recurrent states; start vLLM"):
        with_states(random_model, kv_transfer_config=KVTransferConfig(**several_connectors()))


def test_model_runner_v1_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(envs), "VLLM_USE_V2_MODEL_RUNNER", False)  # vLLM may have read the variable before
    with pytest.raises(ValueError, match="trie_beam needs vLLM's Model Runner V2; unset VLLM_USE_V2_MODEL_RUNNER=0"):
        EngineArgs(str(TRAINED_TARGET), **SELECTING).create_engine_config()


def test_what_model_runner_v2_cannot_do_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cannot = "vllm.config.VllmConfig._get_v2_model_runner_unsupported_features"
    monkeypatch.setattr(cannot, lambda config: ["dual batch overlap"])
    with pytest.raises(ValueError, match="trie_beam does not support dual batch overlap; start vLLM without it"):
        EngineArgs(str(TRAINED_TARGET), **SELECTING).create_engine_config()


def test_another_vllm_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "_version.py").write_text("__version__ = '0.31.0'")
    monkeypatch.setattr(fingerprint, "installed_vllm", lambda: VLLMSources(tmp_path))
    with pytest.raises(VLLMPatchError, match=r"trie_beam does not support vLLM 0\.31\.0; supported: 0\.32, 0\.33"):
        EngineArgs(str(TRAINED_TARGET), **SELECTING).create_engine_config()


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What the plugin logs at the start of engines, by level."""
    lines: dict[str, list[str]] = {"info": [], "warning": []}
    for level, of_level in lines.items():
        log = lambda text, *args, of_level=of_level: of_level.append(text % args)  # noqa: E731
        monkeypatch.setattr(logging.getLogger("vllm.trie_beam"), level, log)
    return lines


def test_an_engine_with_beams_tells_what_it_has_in_one_line(logged: dict[str, list[str]]) -> None:
    version = installed_vllm().version
    EngineArgs(str(TRAINED_TARGET), max_num_seqs=48, **SELECTING).create_engine_config()
    options = {"max_beam_width": 9, "semantics": "vllm"}
    EngineArgs(
        str(TRAINED_TARGET), enable_prefix_caching=False, additional_config={"trie_beam": options}, **drafting()
    ).create_engine_config()
    EngineArgs(str(TRAINED_TARGET)).create_engine_config()
    assert logged["info"] == [
        f"trie_beam on vLLM {version}, Model Runner V2: beams up to 48 wide, semantics hf, speculation off, "
        f"prefix sharing on",
        f"trie_beam on vLLM {version}, Model Runner V2: beams up to 9 wide, semantics vllm, "
        f"speculation {TRAINED_DRAFT}, prefix sharing off",
    ]
    assert logged["warning"] == []


def test_of_several_servers_the_process_that_starts_them_tells(logged: dict[str, list[str]]) -> None:
    for rank in (-1, 0, 1):
        EngineArgs(
            str(TRAINED_TARGET), _api_process_count=2, _api_process_rank=rank, **SELECTING
        ).create_engine_config()
    assert len(logged["info"]) == 1


def test_a_build_that_differs_is_one_warning_and_a_word_in_the_line(
    logged: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fingerprint.VLLMComparison({}, ["vllm.a:one", "vllm.b:Two.three"], [])
    monkeypatch.setattr(fingerprint, "compare_installed_vllm", lambda: found)
    config = {"additional_config": {"trie_beam": {"vllm_check": "warn"}}}
    EngineArgs(str(TRAINED_TARGET), **config).create_engine_config()
    (warning,), (line,) = logged["warning"], logged["info"]
    assert "The first 100 steps of groups are checked. Differences: vllm.a:one, vllm.b:Two.three" in warning
    assert f"trie_beam on vLLM {installed_vllm().version} (2 pieces differ from the record), Model" in line
    with pytest.raises(VLLMPatchError, match=r"vllm\.a:one differs from the record"):  # strict, as all tests
        EngineArgs(str(TRAINED_TARGET), **SELECTING).create_engine_config()


def test_helper_without_vllm_says_what_to_install() -> None:
    hide = "import sys; sys.modules['vllm'] = None\nimport vllm_trie\nvllm_trie.beam_params(2)"
    assert "pip install" in refused(hide)
