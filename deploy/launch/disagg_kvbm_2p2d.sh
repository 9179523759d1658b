#!/usr/bin/env bash
# Two prefill workers with KVBM and two decode workers, behind a frontend that routes by what they hold. The prefill
# workers share one manager, so that each finds what the other computed. Settings: common.sh.
set -euo pipefail
. "$(dirname "$0")/common.sh"
SIDE_PORT=${VLLM_NIXL_SIDE_CHANNEL_PORT:-20096}
EVENTS_PORT=${EVENTS_PORT:-20080}

if [ -z "${DYN_KVBM_MANAGER:-}" ]; then
  DIRECTORY=$(mktemp -d "${TMPDIR:-/tmp}/kvbm-manager.XXXXXX")
  export DYN_KVBM_MANAGER=$DIRECTORY/manager.sock
  "$PYTHON" -m kvbm.cli.main manager --socket "$DYN_KVBM_MANAGER" --host-memory "${DYN_KVBM_CPU_CACHE_GB:-20}GB" &
fi
# A manager has the size; an engine that names one too is told so.
unset DYN_KVBM_CPU_CACHE_GB

frontend --router-mode kv
for number in 0 1; do
  VLLM_NIXL_SIDE_CHANNEL_PORT=$((SIDE_PORT + number)) \
    worker $number --disaggregation-mode decode --kv-transfer-config "$NIXL" \
    --kv-events-config "$(events $((EVENTS_PORT + number)))"
done
for number in 2 3; do
  VLLM_NIXL_SIDE_CHANNEL_PORT=$((SIDE_PORT + number)) \
    worker $number --disaggregation-mode prefill --kv-transfer-config "$KVBM_AND_NIXL" \
    --kv-events-config "$(events $((EVENTS_PORT + number)))"
done
serve
