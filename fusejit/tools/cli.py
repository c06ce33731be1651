"""The `fusejit` command: bench, compile, explain.

In: the arguments of a command line. Out: text on standard output and an exit code: 0 all good, 1 something failed or is
wrong, 2 a bad
    command line.

    fusejit bench [BLOCK ...] [--json FILE]                       every block, eager against fused
    fusejit compile MODULE:FUNCTION [--args EXPR] [--target sm_90]
        registers, spills, shared memory and 16-byte accesses of each kernel
    fusejit explain MODULE:FUNCTION [--args EXPR]                 what is fused, what is not, and why

MODULE is a dotted name or a .py file, FUNCTION a function or an `nn.Module` in it. Its example arguments are, in this
order: `--args`, a
Python expression over the names of the module and `torch`; the function's attribute `example_args`; the module's
`example_args`. The attributes are a tuple, or a function that returns one; the module's may also be a dict from the
function's name to either. A block of
`fusejit bench` goes by its name alone.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any


class Usage(Exception):
    """The command line names something that is not there; the text says what and what to write instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except Usage as error:
        print(f"fusejit: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fusejit", description="Kernel fusion for PyTorch.", epilog="`fusejit COMMAND --help` says more."
    )
    parser.add_argument("--version", action="version", version=f"fusejit {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    one = commands.add_parser("bench", help="measure the blocks, eager against fused")
    one.add_argument("blocks", nargs="*", metavar="BLOCK", help="names of blocks; all if none is given")
    one.add_argument("--json", type=_writable, metavar="FILE", help="also write the rows there")
    one.set_defaults(command=_bench)

    one = commands.add_parser("compile", help="compile a function's kernels, without a GPU")
    _function(one)
    one.add_argument(
        "--target", type=_known_target, default="sm_90", metavar="sm_XX", help="the architecture, sm_90 unless given"
    )
    one.add_argument("--output", type=_folder, metavar="DIR", help="write each kernel's .py, .ptx and .cubin there")
    one.set_defaults(command=_compile)

    one = commands.add_parser("explain", help="say what is fused, what is not, and why")
    _function(one)
    one.add_argument("--source", action="store_true", help="also print each kernel's source")
    one.set_defaults(command=_explain)
    return parser


def _function(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "function", metavar="MODULE:FUNCTION", help="a function or nn.Module, or the name of a block of `fusejit bench`"
    )
    parser.add_argument("--args", metavar="EXPR", help='example arguments, e.g. "torch.randn(8, 16), 0.5"')
    parser.add_argument("--no-grad", action="store_true", help="leave gradients out, even where arguments require them")


def _writable(text: str) -> Path:
    """A file that can be written, found out before the work whose result it is for."""
    path = Path(text)
    if path.is_dir() or not _may_write(path if path.exists() else path.parent):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: name a file in a folder that is there and yours")
    return path


def _folder(text: str) -> Path:
    """A folder that can be written, or made."""
    path = Path(text)
    nearest = next((p for p in (path, *path.absolute().parents) if p.exists()), path)
    if not nearest.is_dir() or not _may_write(nearest):
        raise argparse.ArgumentTypeError(f"{text} is no folder that can be written or made")
    return path


def _may_write(path: Path) -> bool:
    return path.exists() and os.access(path, os.W_OK)


def _known_target(text: str) -> str:
    from ..runtime.compile_workers import target_arch

    try:
        target_arch(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _version() -> str:
    try:
        return version("fusejit")
    except PackageNotFoundError:
        return "of a source tree that is not installed"


def _without_gpu_interpret() -> bool:
    """Switch Triton's interpreter on where there is no GPU, and say whether; it works only before triton is
    imported.
    """
    import torch

    if torch.cuda.is_available():
        return False
    if "triton" not in sys.modules:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    return True


def _bench(arguments: argparse.Namespace) -> int:
    _without_gpu_interpret()
    from .bench import bench, table  # after the interpreter is switched on

    try:
        result = bench(arguments.blocks)
    except KeyError as error:
        raise Usage(error.args[0]) from None
    print(table(result))
    if arguments.json:
        arguments.json.write_text(result.to_json() + "\n")
    return int(bool(result.failed) or not all(row.right for row in result.rows))


def _compile(arguments: argparse.Namespace) -> int:
    import torch

    from ..api.compile_for import compile_for
    from ..errors import FusejitError

    function, args = _target(arguments)
    try:
        with torch.set_grad_enabled(not arguments.no_grad):
            program = compile_for(function, args, target=arguments.target)
    except FusejitError as error:
        print(f"fusejit: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        raise _of_the_function(arguments, error) from error
    print(f"{'kernel':40} {'regs':>5} {'spills':>6} {'shared':>7} {'16-byte':>7}")
    for kernel in program.kernels:
        print(f"{kernel.name:40} {kernel.n_regs:5} {kernel.n_spills:6} {kernel.shared:7} {kernel.wide_loads:7}")
        if arguments.output:
            arguments.output.mkdir(parents=True, exist_ok=True)
            (arguments.output / f"{kernel.name}.py").write_text(kernel.source)
            (arguments.output / f"{kernel.name}.ptx").write_text(kernel.ptx)
            (arguments.output / f"{kernel.name}.cubin").write_bytes(kernel.cubin)
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    interpreted = _without_gpu_interpret()
    import torch

    from ..api.jit import jit
    from ..errors import FusejitError

    function, args = _target(arguments)
    try:
        with torch.set_grad_enabled(not arguments.no_grad):
            report = jit(function, backend="interpret" if interpreted else "triton").explain(*args)
    except FusejitError as error:
        print(f"fusejit: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        raise _of_the_function(arguments, error) from error
    print(report)
    if arguments.source:
        for kernel in report.kernels:
            print(f"\n# {kernel.name}\n{kernel.source}")
    return 0


def _of_the_function(arguments: argparse.Namespace, error: Exception) -> Exception:
    """What the user's function itself raises, with the arguments that were given on the command line, is a bad command
    line.
    """
    if not arguments.args:
        return error
    return Usage(f"{arguments.function} with --args {arguments.args!r}: {type(error).__name__}: {error}")


def _target(arguments: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its example arguments."""
    from .blocks import BLOCKS

    if arguments.function in BLOCKS:
        if arguments.args:
            raise Usage(f"{arguments.function} is a block with arguments of its own: leave --args out")
        block = BLOCKS[arguments.function]
        return block.fn, block.make_untouched(block.real)
    where, colon, name = arguments.function.rpartition(":")
    if not colon:
        raise Usage(f"{arguments.function!r} is no MODULE:FUNCTION and no block; the blocks are {', '.join(BLOCKS)}")
    module = _module(where)
    try:
        function = reduce(getattr, name.split("."), module)
    except AttributeError as error:
        raise Usage(f"{where} has no {name}: {error}") from None
    if not callable(function):
        raise Usage(f"{arguments.function} is a {type(function).__name__}, not a function or an nn.Module")
    return function, _example_args(module, function, name, arguments)


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{where}.".startswith(f"{error.name}."):
                raise
            raise Usage(f"there is no module {where!r} here or on the Python path") from None
    path = Path(where)
    if not path.is_file():
        raise Usage(f"there is no file {where}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise Usage(f"{where} is not a Python file")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _example_args(module: ModuleType, function: Any, name: str, arguments: argparse.Namespace) -> tuple[Any, ...]:
    import torch

    if arguments.args:
        # The expression is the user's own, on the user's own command line.
        try:
            given = eval(arguments.args, {"torch": torch, **vars(module)})
        except Exception as error:
            raise Usage(f"--args {arguments.args!r}: {type(error).__name__}: {error}") from error
    else:
        given = getattr(function, "example_args", None)
        if given is None:
            given = getattr(module, "example_args", None)
            given = given.get(name) if isinstance(given, dict) else given
        if given is None:
            raise Usage(
                f"no example arguments: write --args 'torch.randn(8, 16), ...' or `{name}.example_args = (...)` in "
                f"{module.__name__}"
            )
        given = given() if callable(given) and not isinstance(given, torch.Tensor) else given
    args = given if isinstance(given, tuple) else (given,)
    _check_binds(function, args, name)
    return args


def _check_binds(function: Any, args: tuple[Any, ...], name: str) -> None:
    """Refuse arguments that are too few or too many for a function, before anything is captured."""
    import torch

    try:
        signature = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except (TypeError, ValueError):  # functions written in C have none
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise Usage(f"the example arguments do not fit {name}{signature}: {error}") from None
