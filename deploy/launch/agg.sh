#!/usr/bin/env bash
# Dynamo's frontend and one vLLM worker without KVBM, to compare with. Settings: common.sh.
set -euo pipefail
. "$(dirname "$0")/common.sh"

frontend
worker 0
serve
