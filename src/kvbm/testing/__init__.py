"""Public test kits: subclass one to check your tier, policy or copier, or put faults under ours. They need pytest."""
