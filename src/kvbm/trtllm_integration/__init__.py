"""TensorRT-LLM: the only package that imports it. Importing this package alone does not."""
