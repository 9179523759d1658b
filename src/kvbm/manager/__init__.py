"""Owns G2, G3 and G4 on one node: index, slots, leases, offload and onboard queues, recovery, and the server."""
