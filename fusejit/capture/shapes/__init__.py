"""Sizes and numbers that may vary: their symbols, the policy that makes them, the sizes of regions."""
