"""The original's controller on Dynamo's own runtime: status and resets of a manager, for those who have one joined."""
