"""One capture to something that runs: programs are built, sizes fixed or left open."""
