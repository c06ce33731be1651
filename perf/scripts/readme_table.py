"""The table of README: launches and bytes beside torch.compile's, from a committed result.

Usage: `python perf/scripts/readme_table.py [--write | --check]`. In: perf/results/cpu-peer-static.json, which
perf/static.py wrote with --peer. Out: the table on stdout; --write puts it between the marks of README.md, --check
fails where README holds another one. The blocks that save most bytes have a row, the others are counted.

    | block | launches | torch.compile's | MB moved | torch.compile's |
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "perf" / "results" / "cpu-peer-static.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- table: perf/scripts/readme_table.py -->", "<!-- end of table -->"
SAME = 0.99  # of the peer's bytes: closer than this counts as equal
PASSES = ("forward", "both")
ROWS = 6


def launches(figures: dict[str, Any]) -> int:
    return int(figures["launches"] + figures["externs"])


def compare(case: dict[str, Any]) -> tuple[int, float]:
    """(launches fewer, bytes as a share of the peer's)."""
    ours, peer = case["fusejit"], case["torch.compile"]
    return launches(peer) - launches(ours), ours["bytes_moved"] / peer["bytes_moved"]


def row(case: dict[str, Any]) -> str:
    ours, peer = case["fusejit"], case["torch.compile"]
    name = f"{case['case']}, {'forward and backward' if case['pass'] == 'both' else case['pass']}"
    counts = (launches(ours), launches(peer), f"{ours['bytes_moved'] / 1e6:.0f}", f"{peer['bytes_moved'] / 1e6:.0f}")
    return f"| {name} | {' | '.join(map(str, counts))} |"


def table(result: dict[str, Any]) -> str:
    """The table, and a sentence for what has no row in it."""
    cases = [case for case in result["cases"] if case["pass"] in PASSES]
    compared = [case for case in cases if case["torch.compile"] and case["fusejit"]]
    fewer = [case for case in compared if compare(case)[0] > 0 or compare(case)[1] < SAME]
    more = [case for case in compared if compare(case)[0] < 0 or compare(case)[1] > 2 - SAME]
    equal = len(compared) - len(fewer) - len(more)
    ranked = sorted((case for case in fewer if case not in more), key=lambda case: compare(case)[1])
    head = "| block, 8192 x 8192 in bfloat16 | launches | torch.compile | MB moved | torch.compile |"
    rule = "|---|---:|---:|---:|---:|"
    rest = len(ranked) - ROWS
    said = [f"Fewer in {rest} more."] if rest > 0 else []
    said += [f"Equal in launches, and in bytes within {1 - SAME:.0%}: {equal} cases."]
    said += [f"More: {len(more)} ({', '.join(case['case'] for case in more)})."] if more else ["More in none."]
    failed = sorted({case["case"] for case in cases if not case["torch.compile"]})
    said += [f"Not compared, since torch.compile's script fails: {', '.join(failed)}."] if failed else []
    return "\n".join([head, rule, *map(row, ranked[:ROWS]), "", " ".join(said)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The table of README, from committed results.")
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    parser.add_argument("--check", action="store_true", help="fail where README.md holds another one")
    given = parser.parse_args(arguments)
    made, text = table(json.loads(RESULT.read_text())), README.read_text()
    before, _, rest = text.partition(BEGIN)
    held, _, after = rest.partition(END)
    if given.write:
        README.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")
    elif given.check:
        if held.strip() != made.strip():
            sys.stderr.write(f"README.md holds another table than {Path(__file__).name} makes; --write replaces it\n")
            return 1
    else:
        sys.stdout.write(made + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
