# shellcheck shell=bash disable=SC2034,SC2046
# Sourced by the scripts beside it: what they share. Nothing here is needed to follow them.
#
#   MODEL            a model's name or directory                       Qwen/Qwen3-0.6B
#   DYN_HTTP_PORT    where the frontend listens                        8000
#   WORKER_ARGS      more words for every `python -m dynamo.vllm`      --enforce-eager
#   PYTHON           the Python that has Dynamo, vLLM and KVBM         python3
#   NIXL_THREADS     threads of NIXL; with few cores, 1                4
#   KVBM_ON_DECODE   1: decode workers keep their KV cache too         -
#
# Without ETCD_ENDPOINTS and NATS_SERVER, Dynamo's parts find one another through files and ZMQ: no service to start.

MODEL=${MODEL:-Qwen/Qwen3-0.6B}
PYTHON=${PYTHON:-python3}
WORKER_ARGS=${WORKER_ARGS---enforce-eager}

# Block hashes must be the same in all processes.
export PYTHONHASHSEED=0

OWN_FILES=$(mktemp -d "${TMPDIR:-/tmp}/dynamo.XXXXXX")

if [ -z "${ETCD_ENDPOINTS:-}" ] && [ -z "${NATS_SERVER:-}" ]; then
  export DYN_DISCOVERY_BACKEND=${DYN_DISCOVERY_BACKEND:-file} DYN_EVENT_PLANE=${DYN_EVENT_PLANE:-zmq}
  export DYN_REQUEST_PLANE=${DYN_REQUEST_PLANE:-tcp}
  export DYN_FILE_KV=${DYN_FILE_KV:-$OWN_FILES/discovery}
fi

KVBM='{"kv_connector":"DynamoConnector","kv_role":"kv_both","kv_connector_module_path":"kvbm.vllm_integration.connector","kv_load_failure_policy":"recompute"}'
NIXL_EXTRA="{\"num_threads\":${NIXL_THREADS:-4}}"
NIXL='{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute","kv_connector_extra_config":'$NIXL_EXTRA'}'
KVBM_AND_NIXL='{"kv_connector":"PdConnector","kv_role":"kv_both","kv_connector_module_path":"kvbm.vllm_integration.connector","kv_load_failure_policy":"recompute","kv_connector_extra_config":{"connectors":[{"kv_connector":"DynamoConnector","kv_role":"kv_both","kv_connector_module_path":"kvbm.vllm_integration.connector"},{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_connector_extra_config":'$NIXL_EXTRA'}]}}'
ON_DECODE=$NIXL
[ -z "${KVBM_ON_DECODE:-}" ] || ON_DECODE=$KVBM_AND_NIXL

# One manager for all workers of this machine, unless DYN_KVBM_MANAGER names one: each finds what the others computed.
share_manager() {
  if [ -z "${DYN_KVBM_MANAGER:-}" ]; then
    export DYN_KVBM_MANAGER=$OWN_FILES/manager.sock
    "$PYTHON" -m kvbm.cli.main manager --socket "$DYN_KVBM_MANAGER" --host-memory "${DYN_KVBM_CPU_CACHE_GB:-20}GB" &
  fi
  # The manager has the size; an engine that names one too is told so.
  unset DYN_KVBM_CPU_CACHE_GB
}

# Events of the KV cache, for a router, on this port. Who missed some asks for them at the replay endpoint.
events() {
  printf '{"enable_kv_cache_events":true,"publisher":"zmq","topic":"kv-events","endpoint":"tcp://*:%s",' "$1"
  printf '"replay_endpoint":"ipc://%s/events-%s"}' "$OWN_FILES" "$1"
}

# All parts end with this script, and it with the first of them that ends.
end() {
  trap - EXIT INT TERM
  kill $(jobs -p) 2>/dev/null || true
  wait || true
  rm -rf "$OWN_FILES"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

frontend() {
  "$PYTHON" -m dynamo.frontend --http-port "${DYN_HTTP_PORT:-8000}" "$@" &
}

# worker GPU ARGUMENT…; variables for this worker alone stand in front, as in `A=1 worker 0 …`. Without GPUs the number
# means nothing.
worker() {
  local gpu=$1
  shift
  # shellcheck disable=SC2086 # WORKER_ARGS are words
  CUDA_VISIBLE_DEVICES=$gpu "$PYTHON" -m dynamo.vllm --model "$MODEL" $WORKER_ARGS "$@" &
}

# Until the first part ends, which is an error.
serve() {
  wait -n || true
  echo "a part of the stack ended; the others are stopped" >&2
  exit 1
}
