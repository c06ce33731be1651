"""Graphs to kernels: from a functional ATen graph to a Program."""
