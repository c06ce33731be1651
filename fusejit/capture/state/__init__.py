"""State outside a function: what a capture reads of it and writes to it."""
