"""Blocks in other managers' host memory, read over the network."""
