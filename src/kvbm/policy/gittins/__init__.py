"""The default eviction policy: it learns online when runs of blocks are used again."""
