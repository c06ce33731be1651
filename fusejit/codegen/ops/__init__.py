"""ATen ops: the op table, decompositions, and lowering rules."""
