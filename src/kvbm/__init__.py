"""A KV block manager for LLM inference."""
