"""The distribution `openkvbm`, whose import name is `kvbm`; here is only what must not lie in `kvbm` itself.

NVIDIA publishes a distribution `kvbm` with a package `kvbm` too. Where both are installed, their files lie in one
folder, and which of them runs is a matter of who was installed last. So the question is asked from outside that folder.
"""
