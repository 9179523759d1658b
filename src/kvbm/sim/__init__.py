"""Traces of requests, replayed against the policies: hit rates, times and costs before any money is spent."""
