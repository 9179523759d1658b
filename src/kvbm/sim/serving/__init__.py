"""One engine with host memory and disk in simulated time."""
