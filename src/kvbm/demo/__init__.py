"""The prefix-reuse experiment: what a KV cache beyond the device is worth, shown on real `vllm serve` processes.

Start reading at `experiment.py`. `workload` makes the requests, `server` runs vLLM, `client` talks to it,
`counters` reads metrics pages, `report` judges and prints, `picture` draws.
"""
