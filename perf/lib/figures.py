"""The figures of the seeds beside ours: a table of text from the rows that perf/bench/test_seeds.py leaves.

In: `extra_info` of benchmark rows, or JSON files of pytest-benchmark. Out: text; each line a figure, its target and
whether it is reached.

    $ python perf/lib/figures.py perf/results/cpu-seeds.json
    feature      figure                                         target      here
    vmap         100 rows of hswish, a Python loop / vmap      >= 33.00     ...  reached
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BOUNDS = {
    "at least": (">=", lambda ours, target: ours >= target),
    "at most": ("<=", lambda ours, target: ours <= target),
}


def verdict(figure: Mapping[str, Any]) -> tuple[str, str]:
    """The target as text, and whether it is reached; a figure without a target has neither."""
    if figure["target"] is None:
        return "-", ""
    sign, reached = BOUNDS[figure["bound"]]
    return f"{sign} {figure['target']:.4g}", "reached" if reached(figure["ours"], figure["target"]) else "MISSED"


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The figures of the rows that have some, in their order; "" where there are none. Of a rehearsed run the numbers
    mean nothing.
    """
    rows = [row for row in rows if row.get("figures")]
    if not rows:
        return ""
    cells = [("feature", "figure", "target", "here", "")]
    for row in rows:
        for figure in row["figures"]:
            target, reached = verdict(figure)
            reached = "" if row.get("synthetic") else reached
            cells.append((figure["feature"], figure["text"], target, f"{figure['ours']:.4g}", reached))
    widths = [max(len(line[i]) for line in cells) for i in range(5)]
    lines = [
        "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()
        for line in cells
    ]
    marked = ["SYNTHETIC: a rehearsal at the smallest sizes"] if any(row.get("synthetic") for row in rows) else []
    origin = {f"{row['device']}, torch {row['torch_version']}, commit {row['commit']}" for row in rows}
    return "\n".join([*marked, *lines, *sorted(origin)])


def main(paths: list[str]) -> int:
    if not paths:
        print(__doc__, file=sys.stderr)
        return 2
    text = table(row["extra_info"] for path in paths for row in json.loads(Path(path).read_text())["benchmarks"])
    print(text or "no figures: these are no files of perf/bench/test_seeds.py")
    return 0 if text else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
