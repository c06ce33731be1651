"""fx graph to fx graph: what is rewritten before anything is lowered."""
