"""Public test kits: subclass one to check your tier, store, policy or copier. They need pytest."""
