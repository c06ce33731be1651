"""Matrix products whose rows are only reduced, computed a part of their rows at a time."""
