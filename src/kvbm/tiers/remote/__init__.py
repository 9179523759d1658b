"""G4: blocks in stores that many managers share, and in other managers' host memory."""
