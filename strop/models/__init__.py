"""Models: how they are built, and what they say about responses."""
