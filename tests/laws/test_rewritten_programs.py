"""Random programs: nests of if, elif, while, for, return, break, continue over tensors and Python values, rewritten
against plain Python.

The same program runs as Python, jitted in mode "ast", and row by row under `torch.vmap`; results and gradients are
equal, or a change in place is refused by name and runs eagerly. 20 programs in CI, 2,000 with `--slow`; fewer are
captured under `torch.vmap`, with gradients.
"""

from __future__ import annotations

import itertools
import linecache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import fusejit
from fusejit.frontend.converted_call import rewritten

NUMBERS = itertools.count()
TENSORS = (
    "a",
    "b",
    "x",
    "torch.sin(a)",
    "torch.tanh(a * b)",
    "a + 0.5",
    "b - x",
    "a * n",
    "helper(a, b)",
    "y * 0.7",
    "(a if {test} else b)",
    "torch.where(a > b, a, y)",
    "a / (b * b + 1)",
    "helper(b, x) * 0.5",
)
TESTS = (
    "a.sum() > 0",
    "a[0] < b[1]",
    "n > 1",
    "flag",
    "not a[1] > 0.2",
    "a[0] > 0 and b[0] > 0",
    "a[2] > 0 or n > 2",
    "flag and b[1] < 0.5",
    "-0.5 < a[0] < 0.9",
    "n < b[2]",
    "b.mean()",
    "(a > b).any()",
    "0 < n <= 2",
    "not flag",
    "a[0] > 0 and not (b[1] > 0 or flag)",
    "helper(a, b).sum() > n",
)


class Writer:
    """Draws one function, line by line."""

    def __init__(self, draw: Any) -> None:
        self.draw, self.lines, self.loops = draw, [], 0

    def pick(self, choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def tensor(self) -> str:
        return self.pick(TENSORS).format(test=self.test())

    def test(self) -> str:
        return self.pick(TESTS)

    def block(self, depth: int, indent: int, loop: bool) -> None:
        for _ in range(self.draw(st.integers(1, 2 if depth < 2 else 3))):
            self.statement(depth, indent, loop)

    def statement(self, depth: int, indent: int, loop: bool) -> None:
        kinds = ["tensor", "tensor", "number"]
        kinds += ["if", "if", "if", "for", "while"] if depth else []
        kinds += ["return"] if indent > 1 else []
        kinds += ["break", "continue"] if loop and indent > 2 else []
        kind = self.pick(kinds)
        pad = "    " * indent
        if kind == "tensor":
            self.lines.append(f"{pad}{self.pick(('a', 'b'))} = {self.tensor()}")
        elif kind == "number":
            self.lines.append(pad + self.pick(("n = n + 1", "n += 1", "c += a.detach()", "c = c + b")))
        elif kind == "if":
            self.lines.append(f"{pad}if {self.test()}:")
            self.block(depth - 1, indent + 1, loop)
            for word in self.draw(st.sampled_from(((), ("else:",), ("elif",), ("elif", "else:")))):
                self.lines.append(f"{pad}elif {self.test()}:" if word == "elif" else f"{pad}else:")
                self.block(depth - 1, indent + 1, loop)
        elif kind == "for":
            self.lines.append(f"{pad}for i in range({self.draw(st.integers(1, 3))}):")
            self.lines.append(f"{pad}    a = a + 0.1 * i")
            self.block(depth - 1, indent + 1, True)
            self.maybe_else(depth, pad, indent, loop)
        elif kind == "while":
            self.loops += 1
            count = f"w{self.loops}"
            self.lines += [
                f"{pad}{count} = 0",
                f"{pad}while {count} < 3 and ({self.test()}):",
                f"{pad}    {count} += 1",
            ]
            self.block(depth - 1, indent + 1, True)
            self.maybe_else(depth, pad, indent, loop)
        elif kind == "return":
            self.lines.append(f"{pad}return {self.tensor()}, n")
        else:
            self.lines.append(pad + kind)

    def maybe_else(self, depth: int, pad: str, indent: int, loop: bool) -> None:
        if self.draw(st.booleans()):
            self.lines.append(f"{pad}else:")
            self.block(depth - 1, indent + 1, loop)


@st.composite
def programs(draw: Any) -> str:
    writer = Writer(draw)
    writer.block(2, 1, False)
    head = ["def program(x, y, n, flag):", "    a, b, c = x * 1, y * 1, x * 2"]
    return "\n".join([*head, *writer.lines, "    return a + b * 0.5 + c * 0.1, n", ""])


HELPER = """
def helper(p, q):
    if p.sum() > q.sum():
        return p * 0.5
    for k in range(2):
        if q[k] > 1:
            break
        q = q + p * k
    return torch.cos(q)

"""


def load(text: str) -> Any:
    """Import a program from text that tracebacks and rewrites can read."""
    filename, text = f"<program {next(NUMBERS)}>", HELPER + text
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(text, filename, "exec"), scope)
    return scope["program"]


def run(program: Any, x: torch.Tensor, y: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    result, number = program(x, y, *rest)
    grads = (
        torch.autograd.grad((result * torch.arange(1.0, 4.0)).sum(), (x, y), allow_unused=True)
        if result.requires_grad
        else (None, None)
    )
    zeros = torch.zeros(3, dtype=x.dtype)
    return (
        result.detach(),
        torch.as_tensor(number, dtype=torch.float64),
        *(zeros if grad is None else grad for grad in grads),
    )


def check(text: str) -> None:
    program = load(text)
    torch.manual_seed(1)
    rows = torch.randn(5, 2, 3, dtype=torch.float64)
    jitted = fusejit.jit(program, fullgraph=True, backend="eager")
    for rest in ((1, True), (2, False)):
        wanted = [run(program, *row, *rest) for row in rows]
        try:
            for row, want in zip(rows, wanted):
                torch.testing.assert_close(run(jitted, *row, *rest), want)
        except (
            fusejit.CaptureError
        ) as error:  # `c += a` where `c` may be the one that an `if` or a loop inside a branch left as it was
            if "an in-place change" not in str(error) or "c += " not in text:
                raise
            torch.testing.assert_close(run(fusejit.jit(program, backend="eager"), *rows[0], *rest), wanted[0])
        twin = rewritten(program)
        got = torch.vmap(lambda x, y, twin=twin, rest=rest: as_tensors(twin(x, y, *rest)))(rows[:, 0], rows[:, 1])
        torch.testing.assert_close(got, tuple(torch.stack([want[place] for want in wanted]) for place in (0, 1)))


def check_mapped(text: str) -> None:
    """The program captured under torch.vmap, against Python row by row."""
    program = load(text)
    torch.manual_seed(1)
    rows = torch.randn(5, 2, 3, dtype=torch.float64)
    wanted = [run(program, *row, 1, True) for row in rows]
    x, y = rows[:, 0].clone().requires_grad_(), rows[:, 1].clone().requires_grad_()
    mapped = fusejit.jit(
        lambda x, y: torch.vmap(lambda x, y: as_tensors(program(x, y, 1, True)))(x, y), backend="eager", fullgraph=True
    )
    try:
        found = mapped(x, y)
    except fusejit.CaptureError as error:  # as in `check`
        if "in place" not in str(error).replace("in-place", "in place") or "c += " not in text:
            raise
        return
    grads = (x.detach() * 0, y.detach() * 0)
    if found[0].requires_grad:
        loss = (found[0] * torch.arange(1.0, 4.0)).sum()
        grads = torch.autograd.grad(loss, (x, y), allow_unused=True, materialize_grads=True)
    stacked = tuple(torch.stack([want[place] for want in wanted]) for place in range(4))
    torch.testing.assert_close((*(value.detach() for value in found), *grads), stacked)


def as_tensors(results: Any) -> tuple[torch.Tensor, torch.Tensor]:
    value, number = results
    return value, number.double() if isinstance(number, torch.Tensor) else torch.tensor(
        float(number), dtype=torch.float64
    )


PROFILE = {
    "phases": (Phase.generate,),
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@pytest.mark.full
@settings(max_examples=20, **PROFILE)
@given(programs())
def test_programs(text: str) -> None:
    check(text)


@settings(max_examples=10, **PROFILE)
@given(programs())
def test_mapped_programs(text: str) -> None:
    check_mapped(text)


@pytest.mark.slow
@settings(max_examples=500, **PROFILE)
@given(programs())
def test_five_hundred_mapped_programs(text: str) -> None:
    check_mapped(text)


@pytest.mark.slow
@settings(max_examples=2000, **PROFILE)
@given(programs())
def test_two_thousand_programs(text: str) -> None:
    check(text)
