"""One tier replayed without time: hit rates, LRU curves, the offline optimum."""
