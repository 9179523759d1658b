"""Copies between a CUDA device and host memory: `copier` is the class, the other files are its parts."""
