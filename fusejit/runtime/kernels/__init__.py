"""Device functions, compiled and interpreted: all that a compile worker imports besides Triton."""
