"""The disk tier's bytes moved by NIXL instead of system calls."""
