"""Real vLLM on a CUDA machine without a network: parts to carry there, and steps that prove KVBM there.

`selection` says what is carried, `building` makes the parts, `unpacking` brings them together. `cases` is the list of
what is proven, `running` runs them each in a process of its own and `ledger` keeps their rows; `table` reads the rows.
These modules need nothing but Python's standard library, as nothing else is there before the parts are. What the cases
do is in `probes`, `engines`, `outputs`, `first_tokens` and `latency`, which run where the parts are unpacked.
"""
