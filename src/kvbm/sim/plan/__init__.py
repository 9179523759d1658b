"""`kvbm plan`: the cheapest sizes that meet a target on a trace."""
