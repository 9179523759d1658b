"""The managers that serve each other: who is there, and how they know one another."""
