"""Guards: when a specialisation holds, and why another one was needed."""
