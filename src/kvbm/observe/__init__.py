"""How users observe KVBM: metrics and their HTTP server, hit rates, the log."""
