#!/usr/bin/env bash
# Prefill and decode apart: the prefill worker keeps its KV cache with KVBM and hands it over with NIXL. With
# KVBM_ON_DECODE=1 the decode worker keeps answers in the same cache, where the next turn's prefill finds them.
# Settings: common.sh.
set -euo pipefail
. "$(dirname "$0")/common.sh"
SIDE_PORT=${VLLM_NIXL_SIDE_CHANNEL_PORT:-20096}
export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-20}
[ -z "${KVBM_ON_DECODE:-}" ] || share_manager

frontend
VLLM_NIXL_SIDE_CHANNEL_PORT=$SIDE_PORT \
  worker 0 --disaggregation-mode decode --kv-transfer-config "$ON_DECODE"
VLLM_NIXL_SIDE_CHANNEL_PORT=$((SIDE_PORT + 1)) \
  worker 1 --disaggregation-mode prefill --kv-transfer-config "$KVBM_AND_NIXL"
serve
