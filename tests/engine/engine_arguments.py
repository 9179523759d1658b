"""Every argument of vLLM's engine (0.28 to 0.32), and what it has to do with the KV of given tokens.

`test_identity` varies those of `VARIED` and compares bytes. Each of the others has the reason why it is not varied.
"""

from __future__ import annotations

_VARIED = """
    model served_model_name tokenizer load_format dtype kv_cache_dtype seed max_model_len block_size
    max_num_batched_tokens max_num_seqs num_gpu_blocks_override hf_overrides model_impl enable_lora
"""
VARIED = frozenset(_VARIED.split())

NOT_VARIED: dict[str, str] = {
    "names something, or finds it: content is compared, wherever it lies": """
        hf_config_path model_weights revision code_revision tokenizer_revision tokenizer_mode hf_token download_dir
        config_format skip_tokenizer_init trust_remote_code allowed_local_media_path allowed_media_domains
        io_processor_plugin generation_config
    """,
    "reads the same files in another way": """
        safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size use_tqdm_on_load
        pt_load_map_location max_parallel_loading_workers
    """,
    "how much, how many or when, not what: tests of chunking, batch and threads stand for these": """
        gpu_memory_utilization kv_cache_memory_bytes max_num_scheduled_tokens
        long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_active_seqs max_num_queued_reqs
        max_num_queued_tokens enable_chunked_prefill disable_chunked_mm_input scheduler_reserve_full_isl
        prefill_schedule_interval watermark scheduling_policy scheduler_cls async_scheduling stream_interval
        enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold max_loras max_cpu_loras
        max_lora_rank max_lora_cls_labels prefix_cache_retention_interval swa_bounded_replay performance_mode
        optimization_level disable_cascade_attn kv_sharing_fast_prefill enable_hc_sp
    """,
    "other kernels for the same computation: they round otherwise": """
        enforce_eager compilation_config cudagraph_capture_sizes max_cudagraph_capture_size ir_op_priority
        sparse_indexer_topk_backend enable_flashinfer_autotune
        mm_encoder_attn_backend mm_encoder_tp_mode mamba_backend mamba_ssu_algorithm gdn_prefill_backend
        kda_prefill_backend kda_decode_backend disable_custom_all_reduce fully_sharded_loras specialize_active_lora
        enable_mixed_moe_lora_format enable_moe_shared_loras use_fp64_gumbel enable_bf16x3_router_gemm
    """,
    "for quantized weights a field of the namespace; of others they round otherwise": """
        kernel_config linear_backend moe_backend all2all_backend
    """,
    "a field of the namespace by its value, and no second one can be had on a CPU": """
        quantization quantization_config allow_deprecated_quantization attention_backend attention_config
        kv_cache_dtype_skip_layers model_class_overrides model_loader_extra_config lora_dtype lora_target_modules
        enable_tower_connector_lora disable_sliding_window ignore_patterns
    """,
    "parallel: the number of ranks is a field; what is not accepted is refused (test_refusals)": """
        tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size
        dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size nnodes node_rank
        distributed_executor_backend master_addr master_port distributed_timeout_seconds
        cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus device_ids data_parallel_size
        data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address
        data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb
        data_parallel_multi_port_external_lb data_parallel_backend enable_expert_parallel
        enable_batch_sharded_sampling enable_ep_weight_filter enable_elastic_ep elastic_ep_max_dp_size
        dp_sync_interval disable_nccl_for_dp_synchronization eplb_config enable_eplb expert_placement_strategy
        _api_process_count _api_process_rank ray_workers_use_nsight enable_shm_tensor_arena
    """,
    "in the block's hash, or a field for models with an encoder; the tests' models read text alone": """
        enable_prompt_embeds enable_mm_embeds limit_mm_per_prompt language_model_only interleave_mm_strings
        media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm
        mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin renderer_num_workers skip_mm_profiling
        video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
        mm_device_do_normalize default_mm_loras
    """,
    "several KV cache groups or none: refused (test_refusals)": """
        enable_prefix_caching disable_hybrid_kv_cache_manager mamba_config mamba_cache_dtype mamba_ssm_cache_dtype
        mamba_block_size mamba_cache_mode enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm
        enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds prefix_match_unit engram_config
        enable_mamba_fine_grained_prefix_cache diffusion_config
    """,
    "chooses what follows the KV: logits, samples, texts": """
        runner convert max_logprobs logprobs_mode enable_return_routed_experts return_sampling_mask
        structured_outputs_config reasoning_parser reasoning_parser_plugin reasoning_config pooler_config
        override_generation_config logits_processors watermark_config aux_output_config tokens_only
    """,
    "a draft model's weights and method are fields": """
        speculative_config spec_method spec_model spec_tokens
    """,
    "names blocks, and other names never meet": """
        prefix_caching_hash_algo
    """,
    "says what happens": """
        disable_log_stats aggregate_engine_logging show_hidden_metrics_for_version otlp_traces_endpoint
        collect_detailed_traces per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample
        custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics
        enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats
        profiler_config logging_config log_level log_config_file enable_trace_replay fail_on_environ_validation
    """,
    "moves weights or KV, or watches over the engine": """
        offload_backend cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group
        offload_prefetch_step offload_params kv_transfer_config kv_events_config ec_transfer_config
        ec_manager_config kv_offloading_size kv_offloading_backend enable_sleep_mode sleep_mode_offload_cudagraph
        sleep_preserve_parameter_names enable_cumem_allocator enable_nccl_comm_suspend weight_transfer_config
        fault_tolerance_config enable_fault_tolerance shutdown_timeout
    """,
    "runs code of somebody else, which no list can know": """
        worker_cls worker_extension_cls additional_config
    """,
}


def without_a_reason(arguments: set[str]) -> list[str]:
    """Those of the arguments that stand in neither list."""
    listed = VARIED.union(*(names.split() for names in NOT_VARIED.values()))
    return sorted(arguments - listed)
