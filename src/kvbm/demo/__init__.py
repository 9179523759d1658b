"""The prefix-reuse experiment: the worth of a KV cache beyond the device, shown on real `vllm serve` processes.

Start reading at `experiment.py`. `workload` makes the requests, `server` runs vLLM, `client` talks to it,
`counters` reads metrics pages, `report` judges and prints, `picture` draws.
"""
