"""Graph to graphs: the joint forward and backward graph, its partition, and the autograd function over both."""
