"""Python to graphs: tracing, and the guards that say when a graph still holds."""
