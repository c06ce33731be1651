"""fusejit is built in layers: a folder imports only from folders below it, and in a folder a file only from files
before it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "fusejit"

# From the ground up. A folder stands here with all that it holds, unless a folder inside it has a layer of its own.
LAYERS = [
    *("errors", "torch_private", "knobs", "options", "fork_locks"),
    *("codegen/ir", "codegen/ops", "codegen/graph", "codegen/schedule", "templates", "codegen/passes", "codegen/emit"),
    *(
        "capture",
        "frontend",
        "compile_log",
        "runtime",
        "autodiff",
        "compile",
        "specialise",
        "report",
        "api",
        "tools",
        "moved",
    ),
]

# Inside a folder, from the ground up: files that import each other, and folders ("state/") where they stand between
# files.
INSIDE = {
    "codegen/ir": "effects size layout expr reductions cluster analysis concretize signature graph",
    "codegen/ops": "formulas table decompositions views builder random gather scan concat creation reductions "
    "scatter rules",
    "codegen/graph": "simplify conv_bias",
    "codegen/schedule": "access device registers choice unaligned_rows cost_model",
    "templates": "base pointwise pointwise_2d pointwise_row reduction_persistent reduction_looped "
    "reduction_mixed foreach foreach_reduction table",
    "codegen/passes": "realize lower_externs lower hazards align schedule online profitable block_reduction "
    "nested_reduction rfactor row_column step_graph fusion_rules fuse horizontal horizontal_reduction",
    "codegen/emit": "kernel memory_plan facts index philox_tiles tape row_tape column_tape loop_tape peeled_tape "
    "pipelining writer foreach program",
    "capture": "mutable source_lines pytree outputs memory_pattern fake_mode checkpoints state/ shapes/ scalar_tensors "
    "effect_ops scalar_index functorch foreach_members record_op sort_graph arguments refused tracer guards/ regions/ "
    "compare_traces freeze dynamo",
    "capture/state": "global_names profile_hook iterators reads reach before blind backwards environment recipes "
    "writes recorder",
    "capture/shapes": "symbols policy",
    "capture/guards": "guards recompile_reasons",
    "capture/regions": "extract match detect",
    "frontend": "source lower_jumps dataflow liveness predicate phi subgraph_op aliases branch_nodes batched_while "
    "outline exclude convert "
    "arm_effects operators converted_call capture_ast",
    "runtime": "kernels/ torch_private aten_bindings eager compile_workers static_launcher launch launch_dynamic "
    "cudagraph autotune fast_path unguarded prefer_eager",
    "runtime/kernels": "interpreter math device",
    "autodiff": "partition autograd_function built output_views torch_wrappers joint region_ops compose_regions "
    "chunked/ program_calls",
    "autodiff/chunked": "chunk_op row_local emit chunk",
    "specialise": "dump build specialisation executable specialise dynamic",
    "api": "bound_method disable messages specialisation_table reports stacked_modules transforms dynamo_backend "
    "specialiser function dynamo_function trace_function "
    "module jit jit_class",
    "tools": "blocks bench cli",
}

LINES, CLASS, FUNCTION = 700, 250, 50  # a function's without its docstring; the width of a line is ruff's
# Classes and functions that are longer, with their lines: these may only become fewer and shorter.
LARGE = {
    "capture/shapes/symbols:Symbols": 259,
    "capture/state/recorder:Recorder": 477,
    "capture/tracer:call": 55,
    "capture/tracer:run_body": 70,
    "frontend/branch_nodes:Loop": 258,
    "frontend/branch_nodes:trace": 59,
}

FILES = sorted(ROOT.rglob("*.py"))
MODULES = [f for f in FILES if f.name != "__init__.py" and f.name != "__main__.py"]
FORBIDDEN = ("torch._inductor", "sympy")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import in the file, those inside functions included; `from a import b`
    gives a and a.b.
    """
    package = ["fusejit", *path.relative_to(ROOT).parts[:-1]]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            found += [(node.lineno, ".".join(base))] + [
                (node.lineno, ".".join([*base, alias.name])) for alias in node.names
            ]
    return found


def module(dotted: str) -> str | None:
    """The name of the file that a dotted name stands for, None for what is no file of fusejit."""
    first, *parts = dotted.split(".")
    return (
        "/".join(parts) if first == "fusejit" and parts and ROOT.joinpath(*parts).with_suffix(".py").is_file() else None
    )


def above(used: str, own: str) -> str:
    """Why `own` must not import `used`, or ""."""
    layers = [
        max((layer for layer in LAYERS if f"{name}/".startswith(f"{layer}/")), key=len, default=None)
        for name in (used, own)
    ]
    if None in layers:
        return f"{used if layers[0] is None else own} has no place in LAYERS"
    if layers[0] != layers[1]:
        return (
            "" if LAYERS.index(layers[0]) < LAYERS.index(layers[1]) else f"the layer {layers[0]} lies above {layers[1]}"
        )
    ours, theirs = own.split("/"), used.split("/")
    same = next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    folder, order = "/".join(ours[:same]), INSIDE.get("/".join(ours[:same]), "").split()
    names = [parts[same] + "/" * (len(parts) > same + 1) for parts in (theirs, ours)]
    if missing := [name for name in names if name not in order]:
        return f"{missing[0]} has no place in INSIDE[{folder!r}]"
    return "" if order.index(names[0]) < order.index(names[1]) else f"{names[0]} stands behind {names[1]} in {folder}"


@pytest.mark.cheap
@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_only_from_below(path: Path) -> None:
    own = name_of(path)
    for line, dotted in imports(path):
        assert not dotted.startswith(FORBIDDEN), f"{own}:{line} imports {dotted}"
        used = module(dotted)
        reason = above(used, own) if used not in (None, own) else ""
        assert not reason, f"{own}:{line} imports {used}: {reason}"


# Tables that a file above still fills at import: these may only become fewer.
FILLED = {
    "api/control_flow": ["INSTEAD", "tracer.HIGHER"],
    "autodiff/region_ops": ["LEADS"],
    "frontend/branch_nodes": ["WRITERS"],
}


WRITES = ("append", "extend", "update", "add", "setdefault", "insert")


def imported_names(path: Path) -> set[str]:
    """The names that a file has from other files of fusejit."""
    nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom) and node.level]
    return {alias.asname or alias.name for node in nodes for alias in node.names}


def filled(path: Path) -> list[str]:
    """The tables of other files that a file writes to when it is imported."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [target for target in node.targets if not isinstance(target, ast.Name)]
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif call is not None and isinstance(call.func, ast.Attribute) and call.func.attr in WRITES:
            targets = [call.func.value]
        for target in targets:
            table = target.value if isinstance(target, ast.Subscript) else target
            if ast.unparse(table).partition(".")[0] in imported_names(path):
                found.add(ast.unparse(table))
    return sorted(found)


@pytest.mark.cheap
@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_table_is_filled_from_above(path: Path) -> None:
    assert filled(path) == FILLED.get(name_of(path), [])


def test_every_file_has_a_layer() -> None:
    assert [name_of(f) for f in MODULES if not any(f"{name_of(f)}/".startswith(f"{layer}/") for layer in LAYERS)] == []


def test_layers_and_orders_name_what_exists() -> None:
    names = {name_of(f) for f in MODULES}
    folders = {f.parent.relative_to(ROOT).as_posix() for f in MODULES}
    assert len(set(LAYERS)) == len(LAYERS) and [name for name in LAYERS if name not in names | folders] == []
    inside = [f"{folder}/{name}" for folder, order in INSIDE.items() for name in order.split()]
    assert (
        len(set(inside)) == len(inside)
        and [name for name in inside if name.rstrip("/") not in (folders if name[-1] == "/" else names)] == []
    )


def test_packages_hold_a_docstring_and_nothing_else() -> None:
    """Importing a file of a folder must not import its neighbours: a compile worker takes the device functions only."""
    inits = [f for f in FILES if f.name == "__init__.py" and f.parent != ROOT]
    assert [str(f) for f in inits if len(ast.parse(f.read_text()).body) != 1] == []
    assert {f.parent for f in inits} == {f.parent for f in MODULES if f.parent != ROOT} | {ROOT / "codegen"}


def sizes() -> dict[str, tuple[int, int]]:
    """{"file:name": (lines, the most that it may have)} of every class and function."""
    found = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.end_lineno:
                found[f"{name_of(path)}:{node.name}"] = (node.end_lineno - node.lineno + 1, CLASS)
            elif isinstance(node, ast.FunctionDef) and node.end_lineno:
                documented = ast.get_docstring(node) is not None
                first = node.body[0].end_lineno if documented and len(node.body) > 1 else None
                own = node.end_lineno - (first or node.lineno - 1) + (node.body[0].lineno - node.lineno if first else 0)
                name = f"{name_of(path)}:{node.name}"
                found[name] = max((own, FUNCTION), found.get(name, (0, FUNCTION)))
    return found


def test_files_classes_and_functions_are_short() -> None:
    assert [name_of(path) for path in FILES if path.read_text().count("\n") > LINES] == []
    too_long = {name: own for name, (own, most) in sizes().items() if own > LARGE.get(name, most)}
    assert too_long == {}


def test_large_ones_are_still_there() -> None:
    known = sizes()
    assert [name for name in LARGE if known.get(name, (0, 0))[0] <= known.get(name, (0, 0))[1]] == [], "short by now"


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
