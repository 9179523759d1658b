#!/usr/bin/env bash
# Dynamo's frontend, which routes by what workers hold, and two vLLM workers with KVBM. Settings: common.sh.
set -euo pipefail
. "$(dirname "$0")/common.sh"
export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-2}

frontend --router-mode kv
DYN_KVBM_LEADER_ZMQ_PUB_PORT=${DYN_KVBM_LEADER_ZMQ_PUB_PORT:-56001} \
  worker 0 --kv-transfer-config "$KVBM" --kv-events-config "$(events "${EVENTS_PORT:-20080}")"
DYN_KVBM_LEADER_ZMQ_PUB_PORT=$((${DYN_KVBM_LEADER_ZMQ_PUB_PORT:-56001} + 2)) \
  DYN_KVBM_METRICS_PORT=$((${DYN_KVBM_METRICS_PORT:-6880} + 1)) \
  worker 1 --kv-transfer-config "$KVBM" --kv-events-config "$(events $((${EVENTS_PORT:-20080} + 1)))"
serve
