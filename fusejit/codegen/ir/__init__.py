"""The intermediate representation: sizes, layouts, expressions, clusters, the kernel graph, and their analyses."""
