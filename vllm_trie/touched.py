"""Every piece of vLLM that this plugin wraps, replaces or overrides, why, and when it can go."""

from vllm_trie.patching import Touched
from vllm_trie.worker.cpu.replace import replacements

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_KV_CACHE = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
_GPU = "vllm.v1.worker.gpu"
_RUNNER = f"{_GPU}.model_runner:GPUModelRunner"
_DRAFTER = f"{_GPU}.spec_decode.standalone_ar.speculator:StandaloneARSpeculator"
_COMPLETION = "vllm.entrypoints.openai.completion.protocol:CompletionRequest"
_CHAT = "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest"

_BY_SCHEDULER = "overridden by vllm_trie.engine.scheduler.BeamScheduler"
_BY_ASYNC_SCHEDULER = "overridden by vllm_trie.engine.async_scheduler.AsyncBeamScheduler"
_BY_KV_CACHE = "overridden by vllm_trie.engine.kv_cache.BeamKVCacheManager"
_GROUPS = "vLLM schedules a request that runs as several rows"
_NATIVE = "vLLM has beam search in its engine"
_NO_TRITON = "Triton has no compiler for CPUs, unless triton-cpu is installed"
_CPU_KERNELS = "Model Runner V2 runs on CPUs without Triton (vllm-project/vllm#55847)"

TOUCHED = (
    Touched(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        "wrapped by vllm_trie.plugin",
        "a general plugin has no hook between an engine's arguments and its configuration",
        "vLLM lets a plugin set scheduler_cls and worker_cls",
    ),
    Touched(
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        "wrapped by vllm_trie.entrypoints.requests",
        "a request's options must be refused before anything is scheduled",
        "vLLM lets a plugin validate requests",
    ),
    Touched(
        "vllm.sampling_params:SamplingParams._validate_spec_decode",
        "wrapped by vllm_trie.entrypoints.requests",
        "beams that speculate honour min_p and logit_bias",
        _NATIVE,
    ),
    Touched(
        "vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs",
        "wrapped by vllm_trie.entrypoints.logprobs",
        "cumulative_logprob is filled only together with logprobs",
        "vLLM fills cumulative_logprob from a sum",
    ),
    Touched(
        "vllm.engine.arg_utils:EngineArgs.add_cli_args",
        "wrapped by vllm_trie.entrypoints.cli",
        "vLLM's command line has no --plugin",
        "vLLM lets a plugin add arguments",
    ),
    Touched(
        "vllm.engine.arg_utils:EngineArgs.from_cli_args",
        "wrapped by vllm_trie.entrypoints.cli",
        "--plugin must reach the engine's arguments",
        "vLLM lets a plugin add arguments",
    ),
    *(
        Touched(
            f"vllm.entrypoints.llm:LLM.{method}",
            "relied upon by vllm_trie.entrypoints.batch.search",
            why,
            "vllm run-batch takes prompts and returns hypotheses",
        )
        for method, why in (
            ("from_engine_args", "a batch job takes all options of an engine"),
            ("enqueue", "a prompt that is refused keeps no other from being searched"),
            ("wait_for_completion", "answers come in the order of their prompts"),
        )
    ),
    Touched(
        "vllm.entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin.beam_search",
        "wrapped by vllm_trie.entrypoints.beam_search",
        "LLM.beam_search resubmits every beam at every token",
        _NATIVE,
    ),
    Touched(
        "vllm.entrypoints.generate.beam_search.utils:get_beam_search_score",
        "relied upon by vllm_trie.search.stopping.VllmPool",
        "is the score that semantics='vllm' reproduces",
        _NATIVE,
    ),
    Touched(
        "vllm.entrypoints.generate.beam_search.utils:get_beam_search_eos_token_ids",
        "relied upon by vllm_trie.versions",
        "says what stops the beams that semantics='vllm' reproduces",
        _NATIVE,
        only_in="0.33",
    ),
    Touched(
        "vllm.sampling_params:BeamSearchParams.configure_logprobs",
        "relied upon by vllm_trie.versions",
        "refuses the allowed_token_ids that are left to it",
        _NATIVE,
        only_in="0.33",
    ),
    Touched(
        "vllm.entrypoints.common.offline:OfflineInferenceMixin._run_engine",
        "wrapped by vllm_trie.entrypoints.beam_search",
        "interrupted requests run on during the next call",
        "vLLM aborts them itself",
    ),
    Touched(
        "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search",
        "wrapped by vllm_trie.entrypoints.server",
        "use_beam_search resubmits every beam at every token",
        _NATIVE,
    ),
    *(
        Touched(
            f"{request}.{method}",
            "wrapped by vllm_trie.entrypoints.server",
            why,
            _NATIVE,
        )
        for request in (_COMPLETION, _CHAT)
        for method, why in (
            ("to_beam_search_params", "drops stop, logit_bias and more"),
            ("to_sampling_params", "applies defaults for sampling, which beam search does not do"),
        )
    ),
    Touched(
        "vllm.v1.engine.core_client:DPLBAsyncMPClient.get_core_engine_for_request",
        "wrapped by vllm_trie.entrypoints.data_parallel",
        "n requests of one group must meet in one engine",
        _GROUPS,
    ),
    Touched(
        "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        "relied upon by vllm_trie.engine.outputs",
        "finds the stop string in which a hypothesis ends",
        _GROUPS,
    ),
    Touched(
        "vllm.logprobs:FlatLogprobs.append_fast",
        "relied upon by vllm_trie.entrypoints.logprobs",
        "is what a whole hypothesis does at once",
        "vLLM extends FlatLogprobs by many tokens at once",
    ),
    Touched(
        "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        "wrapped by vllm_trie.metrics",
        "entry points for loggers act on every engine, and not on LLM's",
        "vLLM lets a plugin add a logger to one engine",
    ),
    Touched(
        "vllm.v1.metrics.loggers:StatLoggerManager.record",
        "relied upon by vllm_trie.metrics.BeamStatLogger",
        "passes statistics to the loggers, the first one first",
        "SchedulerStats carries statistics of a plugin",
    ),
    Touched(
        "vllm.v1.metrics.stats:SchedulerStats",
        "relied upon by vllm_trie.engine.stats",
        "kv_connector_stats carries ours to the front end",
        "SchedulerStats carries statistics of a plugin",
    ),
    Touched(
        f"{_SCHEDULER}.__init__",
        f"{_BY_SCHEDULER}, with its KVCacheManager replaced",
        "the scheduler builds its KV cache manager by name",
        "vLLM makes the KV cache manager's class configurable",
    ),
    Touched(
        f"{_SCHEDULER}.add_request", _BY_SCHEDULER, "n requests become one group and its return addresses", _GROUPS
    ),
    Touched(f"{_SCHEDULER}.finish_requests", _BY_SCHEDULER, "return addresses are aborted one by one", _GROUPS),
    Touched(f"{_SCHEDULER}.has_requests", _BY_SCHEDULER, "late return addresses still get their outputs", _GROUPS),
    Touched(f"{_SCHEDULER}.schedule", _BY_SCHEDULER, "budget for a group's other rows is set aside", _GROUPS),
    Touched(
        f"{_SCHEDULER}._handle_blocked_waiting_request",
        _BY_SCHEDULER,
        "the one hook per waiting request, used to admit by rows",
        _GROUPS,
    ),
    Touched(
        f"{_SCHEDULER}.update_draft_token_ids",
        _BY_SCHEDULER,
        "groups have a forest instead of a row of drafts",
        _NATIVE,
    ),
    Touched(f"{_SCHEDULER}._preempt_request", _BY_SCHEDULER, "a preempted group searches anew", _GROUPS),
    Touched(f"{_SCHEDULER}.update_from_output", _BY_SCHEDULER, "a group's outputs go to n addresses", _GROUPS),
    Touched(
        f"{_SCHEDULER}._update_request_with_output",
        _BY_SCHEDULER,
        "the search, not the request's last token, decides when to stop",
        _NATIVE,
    ),
    Touched(f"{_KV_CACHE}.__init__", _BY_KV_CACHE, "holds a block trie per group", _GROUPS),
    Touched(f"{_KV_CACHE}.allocate_slots", _BY_KV_CACHE, "one more slot in every row of a group", _GROUPS),
    Touched(f"{_KV_CACHE}.free", _BY_KV_CACHE, "a group's blocks belong to its trie", _GROUPS),
    Touched(f"{_KV_CACHE}.cache_blocks", _BY_KV_CACHE, "only a group's prompt may enter the prefix cache", _GROUPS),
    Touched(f"{_KV_CACHE}.estimate_cached_tokens", _BY_KV_CACHE, "a group's blocks belong to its trie", _GROUPS),
    Touched(
        f"{_KV_CACHE}.take_kv_cache_block_copies", _BY_KV_CACHE, "widening copies the prompt's partial block", _GROUPS
    ),
    Touched(
        "vllm.model_executor.layers.logits_processor:LogitsProcessor._gather_logits",
        "relied upon by vllm_trie.worker",
        "every tensor parallel rank selects, from the same logits",
        _NATIVE,
    ),
    Touched(
        "vllm.distributed.parallel_state:get_tp_group",
        "relied upon by vllm_trie.worker.rank_check",
        "ranks compare what they decide",
        _NATIVE,
    ),
    Touched(
        "vllm.v1.core.block_pool:BlockPool.get_new_blocks", "relied upon by BeamKVCacheManager", "gives blocks", _GROUPS
    ),
    Touched(
        "vllm.v1.core.block_pool:BlockPool.free_blocks", "relied upon by BeamKVCacheManager", "takes them back", _GROUPS
    ),
    Touched(
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.pop_blocks_for_free",
        "relied upon by BeamKVCacheManager",
        "leaves a prompt's blocks to the tries",
        _GROUPS,
    ),
    Touched(
        "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager.get_num_skipped_tokens",
        "relied upon by BeamKVCacheManager",
        "says what left the window",
        _GROUPS,
    ),
    Touched(
        "vllm.v1.core.kv_cache_utils:get_request_block_hasher",
        "relied upon by vllm_trie.engine.scheduler.BeamScheduler",
        "hashes what all rows of a preempted group have in common",
        _GROUPS,
    ),
    Touched(
        "vllm.v1.request:Request.append_output_token_ids",
        "relied upon by vllm_trie.engine.scheduler.BeamScheduler",
        "keeps the lists of tokens that preemption rewrites",
        _GROUPS,
    ),
    Touched(
        "vllm.v1.engine.parallel_sampling:ParentRequest.get_child_info",
        "relied upon by vllm_trie.params.GroupTicket",
        "names the n requests of one parent",
        _GROUPS,
    ),
    Touched(
        "vllm.v1.worker.gpu_worker:Worker._make_model_runner",
        "overridden by vllm_trie.worker.gpu_worker.BeamGPUWorker",
        "the worker runs our model runner",
        _NATIVE,
    ),
    Touched(
        "vllm.v1.worker.cpu_worker:CPUWorker.init_device",
        "overridden by vllm_trie.worker.cpu_worker.BeamCPUWorker, with its CPUModelRunner replaced",
        "the CPU worker builds its runner by name",
        "CPUWorker gets _make_model_runner",
    ),
    Touched(
        f"{_ASYNC_SCHEDULER}._update_request_with_output",
        _BY_ASYNC_SCHEDULER,
        "a group's pending steps are its placeholders",
        _GROUPS,
        only_in="0.32",
    ),
    Touched(
        f"{_ASYNC_SCHEDULER}._update_after_schedule",
        "relied upon by vllm_trie.engine.async_scheduler.AsyncBeamScheduler",
        "counts placeholders, which it corrects for groups",
        _GROUPS,
    ),
    *(
        Touched(f"{_RUNNER}.{method}", "overridden by vllm_trie.worker.runner.BeamModelRunner", why, _GROUPS)
        for method, why in (
            ("__init__", "groups need books of their own"),
            ("load_model", "the draft model is wrapped as soon as it is there"),
            ("execute_model", "the stock runner must see a group as b requests"),
            ("add_requests", "the first tokens of new rows are on the device"),
            ("update_requests", "forests are drafted once rows have their blocks"),
            ("sample", "beams are selected, not sampled"),
            ("sample_tokens", "what was decided goes to the host beside the tokens"),
        )
    ),
    *(
        Touched(target, f"relied upon by vllm_trie.worker.{by}", why, _GROUPS)
        for target, by, why in (
            (f"{_RUNNER}.finish_requests", "expand", "frees the slots of rows"),
            (f"{_RUNNER}._remove_request", "runner", "frees the slots of rows that last one step"),
            (f"{_RUNNER}.prepare_inputs", "draft", "computes draft tokens of rows, and gives logits at each"),
            (f"{_RUNNER}.postprocess_sampled", "runner", "writes what selection put into the sampled tokens"),
            (f"{_GPU}.states:RequestState", "expand", "holds the tokens of rows"),
            (f"{_GPU}.states:RequestState.add_request", "draft", "gives a slot to rows that last one step"),
            (f"{_GPU}.lora_utils:LoraState.add_request", "draft", "lets them use their group's adapter"),
            (f"{_GPU}.block_table:BlockTables", "reorder", "holds the blocks of rows"),
            (f"{_GPU}.input_batch:InputBatch", "sub_batch", "is what vLLM samples and drafts for"),
            (f"{_GPU}.sample.penalties:PenaltiesState", "select", "holds what penalties count"),
            (f"{_GPU}.sample.sampler:Sampler.__call__", "runner", "samples the rows that are no beams"),
            (f"{_GPU}.sample.sampler:Sampler.apply_sampling_params", "select", "applies penalties, bans and the like"),
            (f"{_GPU}.spec_decode.rejection_sampler:RejectionSampler.__call__", "runner", "verifies ordinary drafts"),
            (f"{_DRAFTER}.propose", "runner", "is wrapped: it drafts for ordinary requests alone"),
            (f"{_DRAFTER}._run_model", "draft_model", "runs the draft model"),
            (f"{_GPU}.attn_utils:build_attn_metadata", "draft_model", "lets the draft model attend to rows of ours"),
            (f"{_GPU}.attn_utils:build_slot_mappings_by_layer", "draft_model", "says where their KV goes"),
            (f"{_GPU}.async_utils:AsyncOutput", "runner.BeamOutput", "is wrapped"),
        )
    ),
    *(
        Touched(target, "wrapped by vllm_trie.worker.cpu.config", why, _CPU_KERNELS)
        for target, why in (
            ("vllm.config.vllm:VllmConfig.use_v2_model_runner", "a CPU without Triton gets Model Runner V1"),
            ("vllm.config.vllm:VllmConfig._validate_v2_model_runner", "refuses Model Runner V2 without Triton"),
            ("vllm.platforms.cpu:CpuPlatform.check_and_update_config", "switches async scheduling off"),
        )
    ),
    Touched(
        "vllm.v1.worker.cpu_worker:CPUWorker.__init__",
        "overridden by vllm_trie.worker.cpu_worker.BeamCPUWorker",
        "a worker refuses Model Runner V2 without Triton",
        _CPU_KERNELS,
    ),
    *(
        Touched(target, f"replaced by {function.__module__}.{function.__name__}", _NO_TRITON, _CPU_KERNELS)
        for target, function in replacements().items()
    ),
)
