"""Public test kits: subclass them to check a tier of your own, or put faults under ours. They need pytest."""
