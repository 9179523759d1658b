"""Stores of named blobs, a file for each kind: objects, a shared directory, Redis. `opening` opens one by its URL."""
