"""KVBM on a CUDA card: are copies, page locks and answers right, how fast are they, and how does vLLM alone compare.

`cases` lists what is measured, `running` runs each case in a process of its own, `ledger` keeps the rows, `table`
prints them. `copies` and `locking` need torch and, on a card, triton. `outputs`, `first_tokens` and `gaps` need vLLM:
an installed one, or the parts that `packing` makes for a machine without a network.
"""
