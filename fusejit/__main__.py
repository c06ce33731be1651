"""`python -m fusejit`: the same as the `fusejit` command."""

from __future__ import annotations

import sys

from .tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
