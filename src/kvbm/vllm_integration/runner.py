"""Which of vLLM's two model runners runs, and what a connector can rely on in a step of each.

CUDA's vLLM takes Model Runner V2 unless a feature forbids it (`VllmConfig.use_v2_model_runner`), a CPU's takes V1. Both
call a connector once a step, in this order (read in 0.32.0; `tests/engine/test_model_runner.py` watches it):

    V1: `GPUModelRunner.execute_model`,             V2: `GPUModelRunner.execute_model` and `sample_tokens`,
        v1/worker/gpu_model_runner.py                   v1/worker/gpu/model_runner.py, v1/worker/gpu/kv_connector.py
    ------------------------------------------      ---------------------------------------------------------------
    handle_preemptions                              add_requests, update_requests: zeroes new blocks, copies blocks
    _update_states: zeroes new blocks,                  that are written to though others share them
        copies shared ones                          prepare_inputs, preprocess_state (moves recurrent state)
    bind_connector_metadata                         pre_forward: handle_preemptions, bind_connector_metadata,
    start_load_kv, if a load is synchronous             start_load_kv if a load is synchronous
    forward pass: wait_for_layer_load and           forward pass: the same two for each layer, but for a whole graph,
        save_kv_layer for each layer, but for           which is replayed without them
        a whole graph                               finish_forward
    start_load_kv, if none is synchronous           sampling; the drafter's forward pass
    wait_for_save                                   post_forward: start_load_kv if none is synchronous, wait_for_save,
    get_transfer_results (get_finished)                 get_transfer_results (get_finished),
    get_block_ids_with_load_errors                      get_block_ids_with_load_errors,
    build_connector_worker_meta                         build_connector_worker_meta,
    clear_connector_metadata                            clear_connector_metadata
    sampling; the drafter's forward pass            a step without tokens: pre_forward and post_forward, in
                                                        `no_forward`

We rely on these facts, which hold on both:

- **The blocks that earlier steps wrote can be read in `handle_preemptions`** (`Worker.store`). On V1 nothing of this
  step was written before it. On V2 `update_requests` may have: it zeroes blocks where
  `KVCacheConfig.needs_kv_cache_zeroing`, copies blocks for hits that end inside a block, and moves recurrent state.
  All of it writes into blocks that were handed out for this step. Where the engine zeroes (which it does for every
  model with recurrent layers) `leader.stores` pins each stored block in the block pool until it is copied, so none of
  them is handed out. Elsewhere nothing of it happens: hits inside a block are looked for beside recurrent layers only,
  and one group of full attention wants `hash_block_size == block_size`, which `support.unsupported_reason` asks for.
- **No step writes into a block that one of its loads fills.** The blocks were free when the step was planned; vLLM
  zeroes none of those that are loaded (`get_loaded_kv_cache_group_ids`, by default all that have hashes). Writes
  of earlier steps into them are queued before `handle_preemptions`, and copies come after that mark
  (`Worker._set_mark`), although V2 calls `start_load_kv` after the forward pass and after sampling.
- **The plan of `handle_preemptions` is that of `start_load_kv` and `get_finished`.** V2 binds it in `execute_model` and
  clears it in `sample_tokens`, and runs no other step between the two.
- **A load before its request may fail.** The request is not yet in the runner: V2 adds it with the count of computed
  tokens that is left (`add_requests`), as it adds those that were preempted, with all of their tokens.
- **A load beside the forward pass may fail only under the policy `fail`.** With `recompute` vLLM takes the count of
  computed tokens back, but V2's `update_requests` writes it to the host's copy alone, and the device goes on from the
  old one: wrong text, however steps are scheduled (its issue 49250). V1 takes it back, but under asynchronous
  scheduling the request keeps a place for a token that was never computed (its issue 45138).
  See `support.layerwise_refusal`.
- **Warming up, profiling and capturing never reach us**: V2 takes the connector out meanwhile (`set_disabled`).
"""

from __future__ import annotations

from typing import Any

V1, V2 = "V1", "V2"


def model_runner(vllm_config: Any) -> str:
    """The model runner that vLLM takes for this configuration, `V1` or `V2`, in the words of its own property.

    A vLLM without that property has V1 alone.
    """
    return V2 if getattr(vllm_config, "use_v2_model_runner", False) else V1
