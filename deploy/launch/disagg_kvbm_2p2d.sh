#!/usr/bin/env bash
# Two prefill workers with KVBM and two decode workers, behind a frontend that routes by what they hold. The prefill
# workers share one manager, so that each finds what the other computed. Settings: common.sh.
set -euo pipefail
. "$(dirname "$0")/common.sh"
SIDE_PORT=${VLLM_NIXL_SIDE_CHANNEL_PORT:-20096}
EVENTS_PORT=${EVENTS_PORT:-20080}

share_manager
frontend --router-mode kv
for number in 0 1; do
  VLLM_NIXL_SIDE_CHANNEL_PORT=$((SIDE_PORT + number)) \
    worker $number --disaggregation-mode decode --kv-transfer-config "$ON_DECODE" \
    --kv-events-config "$(events $((EVENTS_PORT + number)))"
done
for number in 2 3; do
  VLLM_NIXL_SIDE_CHANNEL_PORT=$((SIDE_PORT + number)) \
    worker $number --disaggregation-mode prefill --kv-transfer-config "$KVBM_AND_NIXL" \
    --kv-events-config "$(events $((EVENTS_PORT + number)))"
done
serve
