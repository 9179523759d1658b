"""A client's way to a manager: finding or starting one, and the channel to it."""
