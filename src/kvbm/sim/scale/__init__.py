"""`kvbm scale`: many nodes behind a router."""
