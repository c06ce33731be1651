"""The table of a static run: what perf/static.py --json wrote, for perf/scripts/report.py.

In: its JSON. Out: the cells of a table, a summary, and both as text, as markdown or as a section of the HTML page.
Nothing in it was timed on a device; torch.compile's figures stand in brackets where the run had them.

    case     pass     dtype     shape       launches  MB     least MB  regs     spills  wide   programs  rules
    softmax  forward  bfloat16  16384x4096  1 (1)     268.4  268.4     48 (32)  0 (0)   4/4    16384     met
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NONE = "-"
TITLE = "Without a GPU: what the kernels are, not how fast"


def is_static(path: Path) -> bool:
    """Whether a file is perf/static.py's: a .json with `cases`."""
    return path.suffix == ".json" and "cases" in json.loads(path.read_text())


def read(paths: Sequence[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what the runs say about themselves, and their cases; of several files a later one replaces a case.

    Raises:
        ValueError: the files are of different commits or targets.
    """
    about: dict[str, Any] = {}
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in paths:
        found = json.loads(path.read_text())
        mixed = [key for key in ("commit", "target") if key in about and about[key] != found["about"][key]]
        if mixed:
            raise ValueError(f"these static runs differ in {' and '.join(mixed)}")
        about |= found["about"]
        cases |= {(c["case"], c["pass"], c["dtype"], tuple(c["shape"])): c for c in found["cases"]}
    return about, list(cases.values())


def _figure(case: dict[str, Any], get: Callable[[dict[str, Any]], Any]) -> str:
    ours, peer = case["fusejit"], case["torch.compile"]
    return (str(get(ours)) if ours else NONE) + (f" ({get(peer)})" if peer else "")


def _mega(case: dict[str, Any]) -> str:
    ours = case["fusejit"]
    return f"{(ours['bytes_read'] + ours['bytes_written']) / 1e6:.1f}" if ours else NONE


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("case", lambda c: c["case"]),
    ("pass", lambda c: c["pass"]),
    ("dtype", lambda c: c["dtype"]),
    ("shape", lambda c: "x".join(map(str, c["shape"]))),
    ("launches", lambda c: _figure(c, lambda f: f["launches"] + f["externs"])),
    ("MB", _mega),
    ("least MB", lambda c: f"{c['bytes_minimum'] / 1e6:.1f}"),
    ("regs", lambda c: _figure(c, lambda f: f["regs"])),
    ("spills", lambda c: _figure(c, lambda f: f["spills"])),
    ("wide", lambda c: _figure(c, lambda f: f["wide"])),
    ("programs", lambda c: str(c["fusejit"]["programs"]) if c["fusejit"] else NONE),
    ("rules", lambda c: "; ".join(c["violations"]) or "met"),
)


def cells(cases: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [[title for title, _ in COLUMNS], *([cell(case) for _, cell in COLUMNS] for case in cases)]


def summary(about: dict[str, Any], cases: Sequence[dict[str, Any]]) -> list[str]:
    """How many cases meet every rule, and what the others break."""
    met = sum(not case["violations"] for case in cases)
    return [
        f"{met} of {len(cases)} cases meet every rule of perf/lib/criteria.py",
        "torch.compile's figures in brackets (its spills: stack bytes)"
        if any(c["torch.compile"] for c in cases)
        else "torch.compile: not run",
        "; ".join(f"{key} {value}" for key, value in about.items()),
    ]


def text(about: dict[str, Any], cases: Sequence[dict[str, Any]]) -> str:
    lines = cells(cases)
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    rows = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([TITLE, *rows, "", *summary(about, cases)]) + "\n"


def markdown(about: dict[str, Any], cases: Sequence[dict[str, Any]]) -> str:
    head, *rows = (f"| {' | '.join(line)} |" for line in cells(cases))
    return (
        "\n".join(
            [
                f"## {TITLE}",
                "",
                *(f"* {line}" for line in summary(about, cases)),
                "",
                head,
                "|---" * len(COLUMNS) + "|",
                *rows,
            ]
        )
        + "\n"
    )


def section(about: dict[str, Any], cases: Sequence[dict[str, Any]]) -> str:
    """A part of the HTML page."""
    head, *rows = ([html.escape(cell) for cell in line] for line in cells(cases))
    return "\n".join((
        f"<h2>{TITLE}</h2><ul>{''.join(f'<li>{html.escape(line)}</li>' for line in summary(about, cases))}</ul>",
        f'<div class="scroll"><table><tr>{"".join(f"<th>{c}</th>" for c in head)}</tr>',
        *(f"<tr>{''.join(f'<td>{c}</td>' for c in row)}</tr>" for row in rows),
        "</table></div>",
    ))  # fmt: skip
