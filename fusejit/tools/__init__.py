"""Command line, benchmark and the blocks that both measure."""
