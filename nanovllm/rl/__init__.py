"""For reinforcement learning: an engine whose weights can be replaced, and that can free its memory
while a trainer needs it."""
