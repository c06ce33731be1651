"""Tables and plots of a kernel benchmark: `python perf/scripts/report.py FILE... [--markdown FILE] [--html FILE] [--png
PREFIX]`.

In: what `perf/gpu.sh kernels` leaves: pytest-benchmark JSON, or the .jsonl of a run that was cut short; of several
files a later row replaces an earlier one. The JSON of perf/static.py may be among them, or alone (report_static.py).
Out: a table on stdout (or as markdown), one self-contained HTML page, and PREFIX-roof.png and PREFIX-speedup.png, which
need matplotlib (`pip install 'fusejit[perf]'`). What was not measured is shown as "-", never filled in.

    case      pass     dtype     shape       eager  torch.compile  ...  fusejit-O2  GB/s  % of copy  speedup  error
    softmax   forward  bfloat16  16384x4096   95.1           93.0  ...        90.2  2975         98     1.03  1.9e-03

Speedups are against the better of eager and the torch.compile modes, all of the same run.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report_static

PEERS = ("eager", "torch.compile", "torch.compile-max-autotune")
OURS = ("fusejit-O2", "fusejit-O3")
VARIANTS = (*PEERS, *OURS)
COLOURS = dict(zip(VARIANTS, ("#7f7f7f", "#e69f00", "#d55e00", "#0072b2", "#009e73")))
LEAST = 0.97  # no case may be slower than this against the better peer
NONE = "-"


@dataclass(slots=True)
class Line:
    """One case: median microseconds and error by variant."""

    case: str
    pass_: str
    dtype: str
    shape: tuple[int, ...]
    length: int
    bytes_minimum: int
    us: dict[str, float] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.case} {self.pass_} {self.dtype} {'x'.join(map(str, self.shape))}"

    def speedup(self, variant: str) -> float | None:
        """The better peer's time over this variant's; None where either is missing."""
        peers = [self.us[p] for p in PEERS if p in self.us]
        return min(peers) / self.us[variant] if peers and variant in self.us else None

    def of_copy(self, variant: str) -> float | None:
        """A copy of the same bytes over this variant's time."""
        return self.us["copy"] / self.us[variant] if {"copy", variant} <= self.us.keys() else None

    def gb_s(self, variant: str) -> float | None:
        return self.bytes_minimum / self.us[variant] / 1e3 if variant in self.us else None


@dataclass(frozen=True, slots=True)
class Run:
    """What one machine measured. `about`: device, versions and commit; `synthetic`: the numbers are a rehearsal's and
    mean nothing.
    """

    about: dict[str, str]
    synthetic: bool
    lines: tuple[Line, ...]


# -- reading -----------------------------------------------------------------------------------------------------------
def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the benchmarks of a file; the last line of a .jsonl may be cut off."""
    if path.suffix != ".jsonl":
        return json.loads(path.read_text())["benchmarks"]
    rows, lines = [], path.read_text().splitlines()
    for number, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines) - 1:
                raise
    return rows


def read(paths: Iterable[Path]) -> Run:
    """Return the cases of some files in the order in which they were measured.

    Raises:
        ValueError: the files hold no kernel benchmark, or were measured on different devices, versions or commits.
    """
    lines: dict[tuple[Any, ...], Line] = {}
    about: dict[str, set[str]] = {}
    synthetic = False
    for row in (row for path in paths for row in rows_of(path)):
        info = row["extra_info"]
        if "length" not in info:
            continue  # a block or a model: not of this report
        synthetic |= bool(info.get("synthetic"))
        for key in info:
            if key in ("device", "commit") or key.endswith("_version"):
                about.setdefault(key, set()).add(info[key])
        key = (info["case"], info["pass"], info["dtype"], tuple(info["shape"]), info["length"])
        line = lines.setdefault(key, Line(*key, bytes_minimum=info["bytes_minimum"]))
        line.us[info["variant"]] = row["stats"]["median"] * 1e6
        if "error" in info:
            line.error[info["variant"]] = info["error"]
    if not lines:
        raise ValueError("no kernel benchmarks in these files: perf/gpu.sh kernels writes them")
    mixed = [key for key, values in about.items() if len(values) > 1]
    if mixed:
        raise ValueError(
            f"these files differ in {', '.join(mixed)}: only times of the same machine and tree can be compared"
        )
    return Run({key: values.pop() for key, values in about.items()}, synthetic, tuple(lines.values()))


# -- figures -----------------------------------------------------------------------------------------------------------
def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(run: Run) -> list[str]:
    """The sentences above the table: geometric means, the worst cases, what misses its target, what was not
    measured.
    """
    found = ["SYNTHETIC: a rehearsal's numbers, not measurements"] if run.synthetic else []
    found.append("; ".join(f"{key.removesuffix('_version')} {value}" for key, value in run.about.items()))
    for variant in OURS:
        ranked = sorted(
            ((s, line) for line in run.lines if (s := line.speedup(variant)) is not None), key=lambda pair: pair[0]
        )
        if not ranked:
            found.append(f"{variant}: not measured")
            continue
        mean = geometric_mean([s for s, _ in ranked])
        found.append(
            f"{variant}: {mean:.3f}x the better of eager and torch.compile, geometric mean of {len(ranked)} cases"
        )
        found.append(f"{variant}, worst: " + "; ".join(f"{line.label} {s:.2f}x" for s, line in ranked[:5]))
        found.append(f"{variant}, under {LEAST}x: {sum(s < LEAST for s, _ in ranked)} of {len(ranked)} cases")
        found += [f"{variant}, {text}" for text in roof(run.lines, variant)]
    for variant in (*VARIANTS, "copy"):
        missing = sum(variant not in line.us for line in run.lines)
        found += [f"{variant}: not measured in {missing} of {len(run.lines)} cases"] if missing else []
    return found


# what has to reach which part of a copy: forward of 64 MB and more with rows up to 32K, and the backward of a norm
ROOFS: tuple[tuple[str, float, Callable[[Line], bool]], ...] = (
    (
        "forward of 64 MB and rows up to 32K",
        0.9,
        lambda r: r.pass_ == "forward" and r.bytes_minimum >= 64e6 and r.length <= 32768,
    ),
    ("norm backward", 0.8, lambda r: r.pass_ == "backward" and r.case.endswith("norm")),
)


def roof(lines: Iterable[Line], variant: str) -> list[str]:
    """How many of the cases that a target names reach it."""
    found = []
    for name, wanted, chosen in ROOFS:
        shares = [s for line in lines if chosen(line) and (s := line.of_copy(variant)) is not None]
        if shares:
            reached = sum(s >= wanted for s in shares)
            found.append(
                f"{name}: {reached} of {len(shares)} at {wanted:.0%} of the copy or more, least {min(shares):.0%}"
            )
    return found


def _number(value: float | None, text: str) -> str:
    return NONE if value is None else format(value, text)


Column = tuple[str, Callable[[Line], str]]
COLUMNS: tuple[Column, ...] = (
    ("case", lambda r: r.case),
    ("pass", lambda r: r.pass_),
    ("dtype", lambda r: r.dtype),
    ("shape", lambda r: "x".join(map(str, r.shape))),
    ("MB", lambda r: f"{r.bytes_minimum / 1e6:.0f}"),
    *((f"{v} us", lambda r, v=v: _number(r.us.get(v), ".1f")) for v in (*VARIANTS, "copy")),
    *((f"{v[-2:]} GB/s", lambda r, v=v: _number(r.gb_s(v), ".0f")) for v in OURS),
    *((f"{v[-2:]} % of copy", lambda r, v=v: _number(r.of_copy(v) and 100 * r.of_copy(v), ".0f")) for v in OURS),
    *((f"{v[-2:]} speedup", lambda r, v=v: _number(r.speedup(v), ".2f")) for v in OURS),
    ("error (eager's)", lambda r: f"{_number(r.error.get(OURS[0]), '.1e')} ({_number(r.error.get('eager'), '.1e')})"),
)


def cells(run: Run) -> list[list[str]]:
    return [[title for title, _ in COLUMNS], *([cell(line) for _, cell in COLUMNS] for line in run.lines)]


def text(run: Run) -> str:
    """The table with aligned columns, the summary above it."""
    rows = cells(run)
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    table = [
        "  ".join(c.ljust(w) if i < 4 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]
    return "\n".join([*summary(run), "", table[0], "  ".join("-" * w for w in widths), *table[1:]]) + "\n"


def markdown(run: Run) -> str:
    head, *rows = (f"| {' | '.join(row)} |" for row in cells(run))
    rule = "|" + "|".join(" --- |" if i < 4 else " ---: |" for i in range(len(COLUMNS))).replace("||", "|")
    return "\n".join([*(f"* {line}" for line in summary(run)), "", head, rule, *rows]) + "\n"


# -- curves over N -----------------------------------------------------------------------------------------------------
def groups(run: Run) -> dict[str, list[Line]]:
    """The lines of each (case, pass, dtype), by row length; one of each length, the one that moves most bytes."""
    found: dict[str, dict[int, Line]] = {}
    for line in run.lines:
        by_length = found.setdefault(f"{line.case}, {line.pass_}, {line.dtype}", {})
        other = by_length.get(line.length)
        if other is None or other.bytes_minimum < line.bytes_minimum:
            by_length[line.length] = line
    return {title: [by[n] for n in sorted(by)] for title, by in found.items()}


def curve(lines: Sequence[Line], variant: str) -> list[tuple[int, float]]:
    """(N, % of the copy)."""
    return [(line.length, 100 * share) for line in lines if (share := line.of_copy(variant)) is not None]


WIDTH, HEIGHT, LEFT, BOTTOM = 380, 230, 40, 34


def chart(title: str, lines: Sequence[Line]) -> str:
    """An SVG of % of the copy over N (logarithmic)."""
    curves = {v: points for v in VARIANTS if (points := curve(lines, v))}
    logs = [math.log2(line.length) for line in lines]
    low, span = min(logs), max(max(logs) - min(logs), 1e-9)
    top = max([110.0, *(y for points in curves.values() for _, y in points)])
    x_of = lambda n: LEFT + (WIDTH - LEFT - 12) * ((math.log2(n) - low) / span if len(lines) > 1 else 0.5)  # noqa: E731
    y_of = lambda y: 26 + (HEIGHT - 26 - BOTTOM) * (1 - y / top)  # noqa: E731
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><text x="{LEFT}" y="15" '
        f'class="title">{html.escape(title)}</text>'
    ]
    for share in (0, 25, 50, 75, 100):
        y, kind = y_of(share), "roof" if share == 100 else "grid"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}" class="{kind}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 3:.1f}" class="tick" text-anchor="end">{share}%</text>')
    last = -math.inf
    for line in lines:
        x = x_of(line.length)
        if x - last >= 30:
            parts.append(
                f'<text x="{x:.1f}" y="{HEIGHT - 17}" class="tick" text-anchor="middle">{short(line.length)}</text>'
            )
            last = x
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 4}" class="tick" text-anchor="middle">N</text>')
    for variant, points in curves.items():
        colour = COLOURS[variant]
        path = " ".join(f"{x_of(n):.1f},{y_of(y):.1f}" for n, y in points if not odd(n))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for n, y in points:
            place = (
                f'cx="{x_of(n):.1f}" cy="{y_of(y):.1f}" r="3" stroke="{colour}" fill="{"white" if odd(n) else colour}"'
            )
            parts.append(f"<circle {place}><title>{variant}, N={n}: {y:.0f}%</title></circle>")
    return "".join(parts) + "</svg>"


def odd(n: int) -> bool:
    """Whether a length stands apart from the curve through the powers of two: its rows are not aligned."""
    return n & (n - 1) != 0


def short(n: int) -> str:
    return f"{n // 1024}K" if n >= 1024 and n % 1024 == 0 else f"{n / 1000:.0f}k" if n >= 10000 else str(n)


@dataclass(frozen=True, slots=True)
class Spread:
    """The speedups of one variant over all N of a (case, pass, dtype)."""

    title: str
    variant: str
    least: float
    mean: float
    most: float


def spreads(run: Run) -> list[Spread]:
    """Every group's geometric mean and range, the best first; groups without a measurement are left out."""
    found = []
    for title, lines in groups(run).items():
        for variant in OURS:
            speeds = [s for line in lines if (s := line.speedup(variant)) is not None]
            if speeds:
                found.append(Spread(title, variant, min(speeds), geometric_mean(speeds), max(speeds)))
    return sorted(found, key=lambda s: -s.mean)


def bars(run: Run) -> str:
    """An SVG of `spreads`: a bar for the mean, a whisker for the range, a line at 1."""
    found = spreads(run)
    if not found:
        return "<p>Not measured.</p>"
    left, width, step = 230, 900, 15
    scale = (width - left - 60) / max(1.0, *(s.most for s in found))
    parts = [f'<svg viewBox="0 0 {width} {len(found) * step + 10}" role="img" class="wide">']
    for row, s in enumerate(found):
        y, end = row * step, left + s.most * scale
        parts.append(
            f'<text x="{left - 6}" y="{y + 11}" class="tick" text-anchor="end">{html.escape(s.title)} '
            f"{s.variant[-2:]}</text>"
        )
        parts.append(
            f'<rect x="{left}" y="{y + 2}" width="{s.mean * scale:.1f}" height="{step - 4}" '
            f'fill="{COLOURS[s.variant]}"/>'
        )
        parts.append(
            f'<line x1="{left + s.least * scale:.1f}" x2="{end:.1f}" y1="{y + 7.5}" y2="{y + 7.5}" stroke="#1a1a1a"/>'
        )
        parts.append(
            f'<text x="{max(end, left + s.mean * scale) + 4:.1f}" y="{y + 11}" class="tick">{s.mean:.2f}x</text>'
        )
    parts.append(
        f'<line x1="{left + scale:.1f}" x2="{left + scale:.1f}" y1="0" y2="{len(found) * step}" class="roof"/></svg>'
    )
    return "".join(parts)


STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1240px; padding: 0 1rem; color: #1a1a1a; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(360px, 1fr)); gap: 1rem; }
.title { font-size: 12px; font-weight: 600; } .tick { font-size: 9.5px; fill: #555; }
.grid { stroke: #e4e4e4; } .roof { stroke: #1a1a1a; stroke-dasharray: 4 3; }
.wide { max-width: 980px; }
.key span { display: inline-block; width: 12px; height: 12px; margin: 0 5px 0 14px; vertical-align: -1px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 12px; white-space: nowrap; }
td, th { padding: 2px 8px; text-align: right; border-bottom: 1px solid #eee; }
td:nth-child(-n+4), th:nth-child(-n+4) { text-align: left; }
.synthetic { background: #b00020; color: white; padding: .6rem 1rem; font-weight: 700; }
"""


def page(run: Run, static: str = "") -> str:
    """One HTML page that needs nothing else: summary, % of the roof by N, speedups, the table, and what no device was
    needed for.
    """
    head, *rows = cells(run)
    banner, lines = (
        ("", summary(run)) if not run.synthetic else (f'<p class="synthetic">{summary(run)[0]}</p>', summary(run)[1:])
    )
    key = "".join(f'<span style="background:{COLOURS[v]}"></span>{v}' for v in VARIANTS)
    return "\n".join(
        (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>fusejit: '
            f"kernels</title><style>{STYLE}</style>",
            "<h1>Kernels against the memory "
            f"roof</h1>{banner}<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>",
            "<h2>% of a device copy of the same bytes, by row length</h2>",
            f'<p class="key">{key} &nbsp; dashed: the copy; hollow: rows that are not aligned</p>',
            f'<div class="charts">{"".join(chart(title, found) for title, found in groups(run).items())}</div>',
            "<h2>Speedup against the better of eager and torch.compile: geometric mean and range over "
            f"N</h2>{bars(run)}",
            "<h2>All cases</h2><div "
            f'class="scroll"><table><tr>{"".join(f"<th>{html.escape(c)}</th>" for c in head)}</tr>',
            *(f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in row)}</tr>" for row in rows),
            f"</table></div>{static}</html>",
        )
    )


def static_page(static: str) -> str:
    """The page where nothing was timed."""
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>fusejit: kernels</title><style>{STYLE}</style>'
    return f"{head}<h1>Kernels</h1><p>Times: not measured.</p>{static}</html>"


# -- PNG ---------------------------------------------------------------------------------------------------------------
def png(run: Run, prefix: str) -> list[Path]:
    """Write PREFIX-roof.png and PREFIX-speedup.png.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib  # an optional extra, and only for this
    except ImportError:
        raise SystemExit("--png needs matplotlib: pip install 'fusejit[perf]'; --html needs nothing") from None
    matplotlib.use("Agg")
    made = [Path(f"{prefix}-roof.png"), Path(f"{prefix}-speedup.png")]
    _roof_png(run, made[0])
    _speedup_png(run, made[1])
    return made


def _title(run: Run, text: str) -> str:
    mark = "SYNTHETIC, not measured: " if run.synthetic else ""
    return (
        f"{mark}{text}\n{run.about.get('device', '')}, torch {run.about.get('torch_version', '')}, commit "
        f"{run.about.get('commit', '')}"
    )


def _roof_png(run: Run, path: Path) -> None:
    from matplotlib.figure import Figure

    found = groups(run)
    across = min(4, len(found))
    down = -(-len(found) // across)
    figure = Figure(figsize=(4.2 * across, 2.9 * down + 1.2), layout="constrained")
    for number, (title, lines) in enumerate(found.items()):
        axes = figure.add_subplot(down, across, number + 1)
        for variant in VARIANTS:
            points = curve(lines, variant)
            if points:
                smooth, apart = ([p for p in points if odd(p[0]) is which] for which in (False, True))
                axes.plot(
                    *zip(*smooth or [(math.nan, math.nan)]), "o-", color=COLOURS[variant], label=variant, markersize=3.5
                )
                axes.plot(
                    *zip(*apart or [(math.nan, math.nan)]),
                    "o",
                    color=COLOURS[variant],
                    fillstyle="none",
                    markersize=4.5,
                )
        axes.axhline(100, color="black", linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(kept := [line.length for line in lines if not odd(line.length)] or [lines[0].length])
        axes.set_xticklabels([short(n) for n in kept], fontsize=7)
        axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    figure.suptitle(
        _title(run, "% of a device copy of the same bytes, by row length (hollow: rows that are not aligned)"),
        fontsize=11,
    )
    handles = {label: h for a in figure.axes for h, label in zip(*a.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize=9)
    figure.savefig(path, dpi=110)


def _speedup_png(run: Run, path: Path) -> None:
    from matplotlib.figure import Figure

    found = spreads(run)[::-1]
    means = [s.mean for s in found]
    figure = Figure(figsize=(9, 0.19 * max(len(found), 8) + 1.4), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(range(len(found)), means, color=[COLOURS[s.variant] for s in found])
    for row, s in enumerate(found):
        axes.plot((s.least, s.most), (row, row), color="#1a1a1a", linewidth=1)
    axes.set_yticks(range(len(found)), [f"{s.title} {s.variant[-2:]}" for s in found], fontsize=7)
    axes.set_ylim(-0.7, len(found) - 0.3)
    axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
    axes.set_xlabel("speedup: geometric mean and range over N")
    figure.suptitle(_title(run, "Speedup against the better of eager and torch.compile"), fontsize=10)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tables and plots of a kernel benchmark.")
    parser.add_argument(
        "files", nargs="+", type=Path, help="JSON or .jsonl of perf/gpu.sh kernels, JSON of perf/static.py"
    )
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--html", type=Path, help="write one self-contained page here")
    parser.add_argument("--png", metavar="PREFIX", help="write PREFIX-roof.png and PREFIX-speedup.png")
    given = parser.parse_args(arguments)
    counted = [path for path in given.files if report_static.is_static(path)]
    timed = [path for path in given.files if path not in counted]
    try:
        run = read(timed) if timed or not counted else None
        static = report_static.read(counted) if counted else None
    except ValueError as error:
        parser.error(str(error))
    section = report_static.section(*static) if static else ""
    if given.markdown:
        parts = [markdown(run) if run else "", report_static.markdown(*static) if static else ""]
        given.markdown.write_text("\n".join(part for part in parts if part))
    if given.html:
        given.html.write_text(page(run, section) if run else static_page(section))
    if given.png:
        if not run:
            parser.error("--png draws times, and these files hold none")
        png(run, given.png)
    sys.stdout.write((text(run) if run else "") + (report_static.text(*static) if static else ""))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
