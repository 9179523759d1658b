"""`kvbm simulate`: hit rates and times of policies and sizes on traces."""
