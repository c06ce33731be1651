"""From a Program to launches: device functions, kernel launches and the processes that compile kernels."""
