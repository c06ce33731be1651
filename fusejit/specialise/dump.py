"""Dump: the stages of a compilation as text, printed or written to a folder.

In: a stage's name and its value. Out: nothing, unless FUSEJIT_DUMP names the stage or FUSEJIT_DUMP_DIR a folder.

    FUSEJIT_DUMP=joint,fused python train.py      the joint graph, and the fused clusters of forward and backward
    FUSEJIT_DUMP=backward.source python train.py  the backward's kernels alone
"""

from __future__ import annotations

import os
import sys
from typing import Any

from torch.fx import GraphModule

from .. import knobs


def dump(stage: str, value: Any) -> None:
    """Print a stage if FUSEJIT_DUMP names it, and write it to FUSEJIT_DUMP_DIR."""
    wanted = [s for s in knobs.read("dump").split(",") if s]
    folder = knobs.read("dump_dir")
    last = stage.rsplit(".", 1)[-1]
    if wanted and stage not in wanted and last not in wanted:
        return
    if not wanted and not folder:
        return
    text = value.print_readable(print_output=False) if isinstance(value, GraphModule) else str(value)
    if wanted:
        print(f"# {stage}\n{text}", file=sys.stderr)
    if folder:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"{stage}.txt"), "w") as file:
            file.write(text)
