"""The prefix-reuse experiment: the worth of a KV cache beyond the device, shown on real vLLM servers.

Start reading at `experiment.py`. `workload` makes the requests, `runs` describes the servers, `server` runs them,
`client` sends requests, `counters` reads metrics pages, `report` judges and prints, `picture` draws.
"""
