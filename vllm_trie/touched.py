"""Every piece of vLLM that this plugin wraps, replaces or overrides, why, and when it can go."""

from vllm_trie.patching import Touched
from vllm_trie.worker.cpu.replace import replacements

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_KV_CACHE = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
_COMPLETION = "vllm.entrypoints.openai.completion.protocol:CompletionRequest"
_CHAT = "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest"

_BY_SCHEDULER = "overridden by vllm_trie.engine.scheduler.BeamScheduler"
_BY_ASYNC_SCHEDULER = "overridden by vllm_trie.engine.async_scheduler.AsyncBeamScheduler"
_BY_RUNNER_V2 = "overridden by vllm_trie.worker.v2.BeamModelRunnerV2"
_BY_KV_CACHE = "overridden by vllm_trie.engine.kv_cache.BeamKVCacheManager"
_BY_RUNNER = "overridden by vllm_trie.worker.v1.BeamModelRunner"
_BY_SPECULATION = "overridden by vllm_trie.worker.v1_speculation.SpeculatingModelRunner"
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
    Touched(f"{_RUNNER}.__init__", _BY_RUNNER, "holds the rows of each group", _GROUPS),
    Touched(f"{_RUNNER}.execute_model", _BY_RUNNER, "a group's one entry becomes b rows", _GROUPS),
    Touched(f"{_RUNNER}._sample", _BY_RUNNER, "beams are selected, not sampled", _NATIVE),
    Touched(f"{_RUNNER}.sample_tokens", _BY_RUNNER, "what was decided travels back with the step's output", _NATIVE),
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
        "vllm.v1.sample.sampler:Sampler.apply_logits_processors",
        "relied upon by vllm_trie.worker.v1.BeamModelRunner",
        "applies penalties, biases, bans and custom processors to a group's rows",
        _NATIVE,
    ),
    Touched(
        "vllm.v1.sample.sampler:Sampler.sample",
        "relied upon by vllm_trie.worker.v1.BeamModelRunner",
        "says at which temperature the argmax-invariant processors run",
        _NATIVE,
    ),
    Touched(
        "vllm.v1.worker.gpu_input_batch:InputBatch.refresh_metadata",
        "relied upon by vllm_trie.worker.rows",
        "tells custom processors of a group's rows as of any request",
        _GROUPS,
    ),
    Touched(
        f"{_RUNNER}._update_states",
        "overridden by vllm_trie.worker.v1_speculation.SpeculatingModelRunner, relied upon by vllm_trie.worker.rows",
        "finds rows made by BeamRows; forests are drafted once the batch is what it will be",
        _GROUPS,
    ),
    *(
        Touched(f"{_RUNNER}.{method}", _BY_SPECULATION, why, _NATIVE)
        for method, why in (
            ("calculate_reorder_batch_threshold", "rows of groups must be able to come last"),
            ("_may_reorder_batch", "rows of decoding groups come last"),
            ("_prepare_inputs", "nodes within a forest's rows need logits too"),
            ("propose_draft_token_ids", "vLLM's drafter drafts for ordinary requests alone"),
            ("_input_fits_in_drafter", "only what it drafts for may be too long for the draft model"),
        )
    ),
    *(
        Touched(target, "relied upon by vllm_trie.worker.draft_model", why, _NATIVE)
        for target, why in (
            ("vllm.v1.spec_decode.draft_model:DraftModelProposer", "has the draft model"),
            (f"{_PROPOSER}.build_per_group_and_layer_attn_metadata", "lets the draft model attend to rows of ours"),
            (f"{_PROPOSER}.propose", "computes the draft model's KV of prompts"),
            ("vllm.v1.attention.backend:CommonAttentionMetadata", "describes rows to attention"),
        )
    ),
    Touched(
        "vllm.v1.sample.rejection_sampler:RejectionSampler.parse_output",
        "relied upon by vllm_trie.worker.v1.BeamModelRunner",
        "reads the tokens of several steps, -1 being none",
        _NATIVE,
    ),
    Touched(
        "vllm.v1.worker.gpu_input_batch:InputBatch.swap_states",
        "relied upon by vllm_trie.worker.rows",
        "moves rows of groups behind the others",
        _GROUPS,
    ),
    Touched(
        f"{_RUNNER}._bookkeeping_sync",
        "relied upon by vllm_trie.worker.rows",
        "writes each row's newest token",
        _GROUPS,
    ),
    Touched(
        "vllm.v1.worker.gpu_input_batch:CachedRequestState",
        "relied upon by vllm_trie.worker.rows",
        "is what BeamRows makes of a further beam",
        _GROUPS,
    ),
    Touched(
        "vllm.v1.worker.gpu_input_batch:InputBatch.add_request",
        "relied upon by vllm_trie.worker.rows",
        "takes up a row with its history and blocks",
        _GROUPS,
    ),
    Touched(
        "vllm.v1.worker.gpu_input_batch:InputBatch.remove_request",
        "relied upon by vllm_trie.worker.rows",
        "lets the first row come back with what widening gave it",
        _GROUPS,
    ),
    Touched(
        "vllm.v1.worker.gpu_input_batch:InputBatch.condense",
        "relied upon by vllm_trie.worker.rows",
        "moves rows with all that BeamRows writes into them",
        _GROUPS,
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
        Touched(f"{_RUNNER_V2}.{method}", _BY_RUNNER_V2, why, _GROUPS)
        for method, why in (
            ("__init__", "groups need books of their own"),
            ("load_model", "the sampler is wrapped as soon as it is there"),
            ("execute_model", "the stock runner must see a group as b requests"),
            ("add_requests", "the first tokens of new rows are on the device"),
            ("sample", "selection must know the batch"),
            ("sample_tokens", "what was decided goes to the host beside the tokens"),
        )
    ),
    *(
        Touched(target, f"relied upon by vllm_trie.worker.{by}", why, _GROUPS)
        for target, by, why in (
            (f"{_RUNNER_V2}.finish_requests", "slots", "frees the slots of rows"),
            (f"{_RUNNER_V2}.update_requests", "slots", "gives rows their new blocks"),
            (f"{_RUNNER_V2}.postprocess_sampled", "v2", "writes what selection put into the sampled tokens"),
            ("vllm.v1.worker.gpu.states:RequestState", "slots", "holds the tokens of rows"),
            ("vllm.v1.worker.gpu.block_table:BlockTables", "slots", "holds the blocks of rows"),
            ("vllm.v1.worker.gpu.sample.penalties:PenaltiesState", "slots", "holds what penalties count"),
            ("vllm.v1.worker.gpu.sample.sampler:Sampler.sample", "v2", "is wrapped, where rows would be sampled"),
            ("vllm.v1.worker.gpu.sample.sampler:Sampler.apply_sampling_params", "v2", "applies penalties and bans"),
            (
                "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__",
                "v2",
                "is wrapped, where rows would be sampled beside requests with drafts",
            ),
            ("vllm.v1.worker.gpu.async_utils:AsyncOutput", "v2.BeamOutput", "is wrapped"),
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
    *(
        Touched(target, f"replaced by {function.__module__}.{function.__name__}", _NO_TRITON, _CPU_KERNELS)
        for target, function in replacements().items()
    ),
)
