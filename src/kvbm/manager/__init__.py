"""Owns host memory (G2) and disk (G3) of one node: index, slots, leases, offload and onboard queues, and the server."""
