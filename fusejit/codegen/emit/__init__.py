"""Kernels and programs as text: the writer, its tape, the memory plan, the program."""
