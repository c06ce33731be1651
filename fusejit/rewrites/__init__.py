"""Source to source and function to function: what happens to Python before it is traced."""
