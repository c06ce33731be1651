"""explain(): what ran, what it moved, and what was not fused and why."""
