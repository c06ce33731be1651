"""What a kernel benchmark can tell without a GPU: `python perf/static.py [WORD ...] [--all] [--peer PATH] [--json FILE]
[--target sm_90]`.

In: the cases of cases.py whose id holds every WORD (bfloat16 only, unless --all). Out: a table and, on request, JSON,
and a status of 1 where a case fails or breaks a rule of criteria.py (spills, inputs read twice, narrow loads, idle
multiprocessors, bytes, launches): for each case launches, bytes read and written against the least, registers, spills,
16-byte loads of all loads, the smallest grid, seconds of code generation and of kernel compilation (a kernel that an
earlier case had compiled takes none), the templates. With --peer, the path of a script whose `inductor(fn, args, grad=,
compile=)` compiles what torch.compile would launch on such a GPU, the same figures of torch.compile stand in brackets.
Nothing is timed on a device. The whole table with the peer takes about five minutes on two cores.

    case     pass     shape        launches  MB moved  least  regs   spills  wide  ...
    softmax  forward  16384x4096   1 (1)     268.4     268.4  40 (32)  0 (0)  4/4 (2)

The peer patches torch, so it runs in a process of its own, beside this one: two processes at most compile at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE / "lib")]

import torch  # noqa: E402
from cases import CASES, Case  # noqa: E402
from criteria import of_case, parts  # noqa: E402

NONE = "-"
SAME = 1.01  # times the peer's bytes: one of the two may count a value a row that the other does not save


@dataclass(frozen=True, slots=True)
class Figures:
    """The kernels of one case, ours or the peer's. What one of the two does not tell is None.

    `regs`: of the worst kernel; `spills`: bytes a thread spilled (peer: its stack), all kernels; `wide`: 16-byte loads
    in the PTX, `loads`: all global loads there; `programs`: of the smallest grid.
    """

    launches: int
    externs: int
    regs: int
    spills: int
    wide: int
    codegen_s: float
    compile_s: float
    loads: int | None = None
    bytes_read: int | None = None
    bytes_written: int | None = None
    bytes_moved: int | None = None
    programs: int | None = None
    templates: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()


@dataclass(slots=True)
class Row:
    """One case: `ours` and `peer` are None where it was not compiled, `failed` says why."""

    case: Case
    bytes_minimum: int
    ours: Figures | None = None
    peer: Figures | None = None
    failed: str = ""
    peer_failed: str = ""

    @property
    def violations(self) -> list[str]:
        """What the case does not meet; more launches or bytes than the peer's show only once both are there."""
        if not self.ours:
            return [f"failed: {self.failed}"]
        if not self.peer:
            return list(self.ours.violations)
        mine, peers = (f.launches + f.externs for f in (self.ours, self.peer))
        more = [f"{mine} launches, torch.compile {peers}"] if self.more_launches else []
        if self.more_bytes:
            more.append(
                f"{(self.ours.bytes_moved or 0) / 1e6:.1f} MB moved, torch.compile "
                f"{(self.peer.bytes_moved or 0) / 1e6:.1f}"
            )
        return [*self.ours.violations, *more]

    @property
    def more_launches(self) -> bool:
        """More than torch.compile's, in each part where a case is computed in parts."""
        if not self.ours or not self.peer:
            return False
        return self.ours.launches + self.ours.externs > parts(self.case) * (self.peer.launches + self.peer.externs)

    @property
    def more_bytes(self) -> bool:
        moved, theirs = (f.bytes_moved if f else None for f in (self.ours, self.peer))
        return moved is not None and theirs is not None and moved > SAME * theirs

    def to_json(self) -> dict[str, Any]:
        case = self.case
        about = {
            "case": case.name,
            "pass": case.pass_,
            "dtype": case.dtype_name,
            "shape": list(case.shape),
            "length": case.length,
        }
        both = {
            name: asdict(f) if f is not None else None
            for name, f in (("fusejit", self.ours), ("torch.compile", self.peer))
        }
        return (
            about
            | {"bytes_minimum": self.bytes_minimum}
            | both
            | {"violations": self.violations, "failed": self.failed, "peer_failed": self.peer_failed}
        )


# -- ours --------------------------------------------------------------------------------------------------------------
def least(case: Case) -> tuple[int, int]:
    """The bytes that have to be read, and written, from shapes alone."""
    args = case.make("meta")
    with torch.no_grad():
        outputs = torch.utils._pytree.tree_leaves(case.family.block.fn(*args))
    return case.bytes_least(args, outputs)


def ours(case: Case, target: str) -> Figures:
    """Compile a case for a GPU that need not be there."""
    from fusejit import compile_for

    block = case.family.block
    args = block.make_untouched(case.shape, case.dtype)
    with torch.set_grad_enabled(case.pass_ != "forward"):
        found = compile_for(block.fn, args, target=target, name=case.name)
        halves = {"forward": (found.forward,), "backward": (found.backward,), "both": (found.forward, found.backward)}[
            case.pass_
        ]
    runs = [run for program in halves for run in program.runs]  # parts of a product are Programs that run several times
    kernels = [k for program, count in runs for k in program.kernels * count]
    stages = [ms for program, _ in runs for stage, ms in program.compile_ms.items() if stage != "kernels"]
    return Figures(
        launches=sum(program.launches * count for program, count in runs),
        externs=sum(len(program.externs) * count for program, count in runs),
        regs=max((k.n_regs for k in kernels), default=0),
        spills=sum(k.n_spills for k in kernels),
        wide=sum(k.wide_loads for k in kernels),
        loads=sum(len(re.findall(r"\bld\.global", k.ptx)) for k in kernels),
        codegen_s=sum(stages) / 1e3,
        compile_s=sum(seconds for seconds in {k.name: k.compiled.seconds for k in kernels}.values()),
        bytes_read=sum(k.bytes_read for k in kernels),
        bytes_written=sum(k.bytes_written for k in kernels),
        bytes_moved=sum(k.bytes_read + k.bytes_written for k in kernels),
        programs=min((k.grid[0] * k.grid[1] * k.grid[2] for k in kernels), default=0),
        templates=tuple(k.template for k in kernels),
        violations=tuple(of_case(case, kernels, *least(case))),
    )


# -- the peer, in a process of its own ---------------------------------------------------------------------------------
def serve(path: str) -> None:
    """Answer case ids on stdin with one line of JSON each, made by the script at `path`; stdout holds nothing else."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, str(Path(path).resolve().parent))
    peer = __import__(Path(path).stem)
    moved = count_bytes()
    by_id = {case.id: case for case in CASES}
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = asdict(theirs(by_id[line.strip()], peer.inductor, moved))
        except Exception as error:  # one case that it cannot compile must not hide the others
            answer = {
                "error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            }
        print(json.dumps(answer), file=answers, flush=True)


def count_bytes() -> list[int]:
    """Let the peer note the bytes of each graph's kernels, every operand once, as they are generated; return the list
    that it fills.
    """
    from torch._inductor.graph import GraphLowering

    moved: list[int] = []
    generate = GraphLowering.compile_to_module

    def counted(graph: Any) -> Any:
        try:
            return generate(graph)
        finally:
            moved.append(graph.count_bytes()[0])

    GraphLowering.compile_to_module = counted
    return moved


# rows and columns reduced at once leave partial results in a workspace, that torch sums: neither is counted otherwise
WORKSPACE = re.compile(r"workspace_\d+ = empty_strided_cuda\(\((\d+), \), \(1, \), torch\.(\w+)\)")
SUMMED = re.compile(r"workspace_\d+\[.*\.sum\(")


def _workspaces(source: str) -> int:
    """The bytes of all workspaces, written once and read once."""
    return sum(2 * int(count) * getattr(torch, dtype).itemsize for count, dtype in WORKSPACE.findall(source))


def theirs(case: Case, inductor: Callable[..., dict[str, Any]], moved: list[int]) -> Figures:
    """The peer's kernels of a case, for fake tensors: nothing is computed. `moved`: see count_bytes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # the peer runs its graphs once, outside the mode, where constants are real tensors
    block, mode = case.family.block, FakeTensorMode(allow_non_fake_inputs=True)
    plain = block.make_untouched(case.shape, case.dtype)
    fixed = [not (isinstance(a, torch.Tensor) and a.requires_grad) for a in plain]
    args = [mode.from_tensor(a.detach()) if isinstance(a, torch.Tensor) else a for a in plain]

    def fn(*given: Any) -> Any:  # the peer asks for gradients of every floating argument
        return block.fn(
            *(a.detach() if f and isinstance(a, torch.Tensor) else a for a, f in zip(given, fixed, strict=True))
        )

    moved.clear()
    phases = inductor(fn, args, grad=case.pass_ != "forward", compile=True)
    generated = dict(zip(phases, moved, strict=True)) if len(moved) == len(phases) else None
    names = {"forward": ("inference",), "backward": ("backward",), "both": ("forward", "backward")}[case.pass_]
    chosen = [phases[name] for name in names]
    stats = [s for phase in chosen for s in phase.stats]
    return Figures(
        launches=sum(p.launches for p in chosen),
        externs=sum(p.externs + len(SUMMED.findall(p.source)) for p in chosen),
        bytes_moved=sum(generated[name] + _workspaces(phases[name].source) for name in names) if generated else None,
        regs=max((s["regs"] for s in stats), default=0),
        spills=sum(s["stack"] for s in stats),
        wide=sum(s["wide_loads"] for s in stats),
        codegen_s=sum(p.codegen_s for p in chosen),
        compile_s=sum(p.compile_s for p in chosen),
    )


def ask_peer(path: Path, rows: Sequence[Row]) -> None:
    """Fill in the peer's side of all rows."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        for number, row in enumerate([rows[0], *rows]):  # the first twice: its answer would count imports
            print(row.case.id, file=process.stdin, flush=True)
            answer = process.stdout.readline()
            if not answer:
                row.peer_failed = "the peer's process ended"
                break
            if number:
                found = json.loads(answer)
                if "error" in found:
                    row.peer_failed = found["error"]
                else:
                    row.peer = Figures(**found | {"templates": (), "violations": ()})
        process.stdin.close()


# -- the table ---------------------------------------------------------------------------------------------------------
def _pair(row: Row, get: Callable[[Figures], Any], text: str) -> str:
    mine = format(get(row.ours), text) if row.ours else NONE
    return mine if row.peer is None else f"{mine} ({format(get(row.peer), text)})"


def _mb(row: Row, get: Callable[[Figures], int | None]) -> str:
    return f"{(get(row.ours) or 0) / 1e6:.1f}" if row.ours else NONE


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("case", lambda r: r.case.name),
    ("pass", lambda r: r.case.pass_),
    ("dtype", lambda r: r.case.dtype_name),
    ("shape", lambda r: "x".join(map(str, r.case.shape))),
    ("launches", lambda r: _pair(r, lambda f: f.launches + f.externs, "d")),
    ("MB read", lambda r: _mb(r, lambda f: f.bytes_read)),
    ("MB written", lambda r: _mb(r, lambda f: f.bytes_written)),
    ("least MB", lambda r: f"{r.bytes_minimum / 1e6:.1f}"),
    ("MB moved", lambda r: _pair(r, lambda f: (f.bytes_moved or 0) / 1e6, ".1f")),
    ("moved/least", lambda r: f"{r.ours.bytes_moved / r.bytes_minimum:.2f}" if r.ours else NONE),
    ("regs", lambda r: _pair(r, lambda f: f.regs, "d")),
    ("spills", lambda r: _pair(r, lambda f: f.spills, "d")),
    (
        "wide loads",
        lambda r: (f"{r.ours.wide}/{r.ours.loads}" if r.ours else NONE) + (f" ({r.peer.wide})" if r.peer else ""),
    ),
    ("programs", lambda r: str(r.ours.programs) if r.ours else NONE),
    ("codegen s", lambda r: _pair(r, lambda f: f.codegen_s, ".3f")),
    ("compile s", lambda r: _pair(r, lambda f: f.compile_s, ".2f")),
    ("templates", lambda r: " ".join(dict.fromkeys(r.ours.templates)) if r.ours else r.failed),
)


def table(rows: Sequence[Row], about: dict[str, Any]) -> str:
    lines = [[title for title, _ in COLUMNS], *([cell(row) for _, cell in COLUMNS] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    left = (*range(4), len(COLUMNS) - 1)
    text = [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()
        for line in lines
    ]
    text.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join([*text, "", *summary(rows), "; ".join(f"{key} {value}" for key, value in about.items())]) + "\n"


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """What stands out: spills, bytes beyond the least, launches beyond the peer's, grids that leave an H100 idle,
    failures.
    """
    done = [row for row in rows if row.ours]
    beyond = [r for r in done if (r.ours.bytes_moved or 0) > 1.05 * r.bytes_minimum]
    yield (
        "ours, torch.compile's in brackets (its spills: stack bytes; its bytes: each operand of each kernel once, as "
        "ours)"
    )
    for title, found in (
        ("spill", [r for r in done if r.ours.spills]),
        ("move over 1.05 times the least", beyond),
        ("launch more than torch.compile", [r for r in done if r.more_launches]),
        (f"move over {SAME} times torch.compile's bytes", [r for r in done if r.more_bytes]),
        ("have a grid under 132 programs", [r for r in done if r.ours.programs < 132]),
    ):
        names = ", ".join(r.case.id for r in found[:6]) + (", ..." if len(found) > 6 else "")
        yield f"{len(found)} of {len(rows)} {title}" + (f": {names}" if found else "")
    yield f"{sum(not r.violations for r in rows)} of {len(rows)} meet every rule"
    yield from (f"VIOLATION {r.case.id}: {text}" for r in rows if r.ours for text in r.violations)
    yield from (f"FAILED {r.case.id}: {r.failed}" for r in rows if r.failed)
    yield from (f"failed in the peer's script: {r.case.id}: {r.peer_failed}" for r in rows if r.peer_failed)


# -- the command -------------------------------------------------------------------------------------------------------
def select(words: Sequence[str], every: bool) -> list[Case]:
    """The cases whose id holds every word, those of bfloat16 unless `every`."""
    return [
        case for case in CASES if all(word in case.id for word in words) and (every or case.dtype is torch.bfloat16)
    ]


def count(
    cases: Sequence[Case], target: str, peer: Path | None, show: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """Compile every case, ours here and the peer's in its process meanwhile."""
    from fusejit.errors import FusejitError

    rows = [Row(case, sum(least(case))) for case in cases]
    beside = threading.Thread(target=ask_peer, args=(peer, rows), daemon=True) if peer and rows else None
    if beside:
        beside.start()
    for number, row in enumerate([*rows[:1], *rows]):  # the first twice: it would count imports
        show(f"[{number}/{len(rows)}] {row.case.id}")
        try:
            row.ours = ours(row.case, target)
        except (FusejitError, RuntimeError, AssertionError) as error:
            row.failed = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    if beside:
        show("waiting for torch.compile's script")
        beside.join()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Kernels, bytes, registers and compile times of the kernel benchmarks, without a GPU."
    )
    parser.add_argument("words", nargs="*", help="keep cases whose id holds all of these: softmax forward 4096")
    parser.add_argument("--all", action="store_true", help="float32 as well")
    parser.add_argument("--peer", type=Path, help="the script that shows what torch.compile would launch")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        serve(given.serve)
        return 0
    from fusejit.tools.bench import commit, progress, versions

    cases = select(given.words, given.all)
    if not cases:
        parser.error(f"no case holds {' and '.join(given.words)}; ids are like {CASES[0].id}")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache, progress(sys.stderr) as show:
        os.environ["TRITON_CACHE_DIR"] = cache  # a kernel that was compiled yesterday would take no time
        if given.peer:
            os.environ["FUSEJIT_WORKERS"] = "1"
        rows = count(cases, given.target, given.peer, show)
    about = {"target": given.target, **versions(), "commit": commit(), "seconds": round(time.perf_counter() - start)}
    if given.json:
        given.json.write_text(json.dumps({"about": about, "cases": [row.to_json() for row in rows]}, indent=1) + "\n")
    sys.stdout.write(table(rows, about))
    return any(row.violations for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
