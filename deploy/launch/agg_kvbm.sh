#!/usr/bin/env bash
# Dynamo's frontend and one vLLM worker with KVBM. Settings: common.sh.
set -euo pipefail
. "$(dirname "$0")/common.sh"
export DYN_KVBM_CPU_CACHE_GB=${DYN_KVBM_CPU_CACHE_GB:-20}

frontend
worker 0 --kv-transfer-config "$KVBM"
serve
