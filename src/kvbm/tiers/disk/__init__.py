"""The disk tier: slabs, a slot journal, O_DIRECT; `tier` is the class, the other files are its parts."""
