"""A check of the installation, outside the folder `kvbm`. The distribution `openkvbm` has the import name `kvbm`.

NVIDIA publishes a distribution `kvbm`, whose package is called `kvbm` too. If both are installed, their files lie in
one folder, and the later one has overwritten files of the earlier one. Code in that folder could not check this.
"""
