"""A file of fusejit imports only from files above it in `ORDER`: the data goes one way, and there are no circles."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "fusejit"

# From the bottom up. A new file gets a place here; `folder/` stands for that folder's __init__.py.
ORDER = [
    *("errors", "config", "forks", "stack", "settings"),
    *("codegen/", "codegen/size", "codegen/layout", "codegen/cluster", "codegen/hinted", "codegen/sized", "codegen/formulas"),
    *("codegen/ops", "codegen/decompose"),
    "codegen/algebra",
    *("codegen/views", "codegen/random"),
    *("codegen/pattern", "codegen/realize", "codegen/simplify", "codegen/lower", "codegen/indexing"),
    *("codegen/onehot", "codegen/pieces", "codegen/rowsums", "codegen/scans", "codegen/scatter", "codegen/sums", "codegen/rules"),
    "codegen/lift_bias",
    "codegen/order",
    *("codegen/keep", "codegen/live", "codegen/cost", "codegen/crossing", "codegen/peel"),
    *("codegen/schedule", "codegen/online", "codegen/split", "codegen/align"),
    *("codegen/pressure", "codegen/mix", "codegen/nest", "codegen/segments", "codegen/whole", "codegen/shares",
      "codegen/fuse"),
    *("codegen/epilogue", "codegen/cats", "codegen/foreach", "codegen/many"),
    *("codegen/kernel", "codegen/lanes", "codegen/tape", "codegen/ends", "codegen/stages",
      "codegen/render", "codegen/render_foreach", "codegen/plan", "codegen/program", "templates/"),
    *("capture/", "capture/hook", "capture/lines", "capture/names", "capture/mutable", "capture/tree", "capture/reads", "capture/streams"),
    *("capture/outside", "capture/arguments"),
    *("rewrites/", "rewrites/source", "rewrites/jumps", "rewrites/liveness", "rewrites/select", "rewrites/flow", "rewrites/outline"),
    "rewrites/numbers",
    *("capture/effects", "capture/identity", "capture/indexing", "capture/ordered", "capture/transforms"),
    *("capture/record", "capture/arrange"),
    *("capture/refused", "capture/symbols", "capture/lookalike", "capture/outputs", "capture/writes", "capture/trace"),
    *("capture/guards", "capture/dynamic", "capture/lockstep", "capture/constants", "capture/reasons", "capture/bytecode"),
    "rewrites/exclude",
    *("capture/relocate", "capture/spans", "capture/cut", "capture/regions", "rewrites/lazy_inline", "rewrites/hypermap"),
    *("rewrites/arms", "rewrites/aliases", "rewrites/merge", "rewrites/surroundings"),
    *("rewrites/pieces", "rewrites/branches", "rewrites/rounds"),
    *("rewrites/control", "rewrites/calls", "rewrites/by_hand", "rewrites/capture"),
    "runtime/torch_c",
    *("autodiff/", "autodiff/attention", "autodiff/cumprod", "autodiff/partition", "autodiff/bridge", "autodiff/joint"),
    *("autodiff/rowlocal", "autodiff/rowcall", "autodiff/parts", "autodiff/chunk", "autodiff/heads"),
    *("autodiff/region", "autodiff/compose", "autodiff/seams"),
    *("rewrites/ensemble", "rewrites/batch"),
    *("runtime/", "runtime/tensors", "runtime/twins", "runtime/maths", "runtime/device"),
    *("runtime/workers", "runtime/static_launch", "runtime/launch", "runtime/sized", "runtime/tune", "runtime/direct", "runtime/eager"),
    *("runtime/bind", "runtime/promise", "runtime/cudagraph", "runtime/choose", "variants"),
    *("compile", "programs", "specialise", "ahead", "sizes", "explain"),
    *("backend", "switch", "method", "function", "bytecode", "module", "jit", "tracing", "rewrites/jit_class",
      "blocks", "bench", "cli", "__main__"),
]  # fmt: skip

FILES = sorted(ROOT.rglob("*.py"))
FORBIDDEN = ("torch._inductor", "sympy")


def name_of(path: Path) -> str:
    relative = path.relative_to(ROOT).with_suffix("").as_posix()
    return relative.removesuffix("__init__") if relative.endswith("/__init__") else relative


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import in the file, those inside functions included; `from a import b` gives a and a.b."""
    package = ["fusejit", *path.relative_to(ROOT).parts[:-1]]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            found += [(node.lineno, ".".join(base))] + [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]
    return found


def place(dotted: str) -> str | None:
    """The name in ORDER of a dotted name, None for what is no file of fusejit."""
    parts = dotted.split(".")
    if parts[0] != "fusejit":
        return None
    path = ROOT.joinpath(*parts[1:])
    if path.with_suffix(".py").is_file() and len(parts) > 1:
        return "/".join(parts[1:])
    return "/".join(parts[1:]) + "/" if path.is_dir() and len(parts) > 1 else None


@pytest.mark.parametrize("path", [f for f in FILES if name_of(f) != "__init__"], ids=name_of)
def test_imports_only_from_above(path: Path) -> None:
    own = name_of(path)
    assert own in ORDER, f"{own} has no place in ORDER of {Path(__file__).name}"
    for line, dotted in imports(path):
        assert not dotted.startswith(FORBIDDEN), f"{own}:{line} imports {dotted}"
        used = place(dotted)
        if used is None or used == own:
            continue
        if used.endswith("/") and own.startswith(used):
            continue  # the package that the file itself is in
        assert ORDER.index(used) < ORDER.index(own), f"{own}:{line} imports {used}, which stands below it"


def test_order_names_files_that_exist() -> None:
    names = {name_of(f) for f in FILES}
    assert [name for name in ORDER if name not in names and not name.endswith("/")] == []


def test_files_and_functions_are_short() -> None:
    """500 lines a file, 50 a function, unless the top of the file says why not ("Long:")."""
    too_long = []
    for path in FILES:
        text = path.read_text()
        if "Long:" in (ast.get_docstring(ast.parse(text)) or ""):
            continue
        if text.count("\n") > 500:
            too_long.append(f"{name_of(path)}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno and node.end_lineno - node.lineno >= 50:
                too_long.append(f"{name_of(path)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines")
    assert too_long == []


def test_importing_fusejit_is_cheap() -> None:
    """`import fusejit` costs torch and little more: no Triton, no Dynamo, no AOTAutograd, no sympy of ours."""
    import subprocess
    import sys

    code = (
        "import torch, sys; before = set(sys.modules); import fusejit;"
        "late = [m for m in ('triton', 'torch._dynamo', 'torch._functorch.aot_autograd', 'torch._inductor.compile_fx') "
        "if m in sys.modules and m not in before]; print(late)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT.parent)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
