"""Source to source: Python control flow becomes calls that a capture can follow."""
