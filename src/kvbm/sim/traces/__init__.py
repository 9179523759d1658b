"""Traces: reading, recording, making and halving them."""
