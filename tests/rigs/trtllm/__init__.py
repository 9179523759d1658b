"""A double of TensorRT-LLM's side of its connector interface. The package itself needs a GPU and its own container."""
