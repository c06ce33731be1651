"""Kernel graph to kernel graph: lowering, fusion, rfactor, horizontal fusion, scheduling."""
