"""A law: what a call does to the user's objects is what eager does, whatever it reads and changes on the way.

Programs are generated: functions that read and change lists, dicts, sets, deques, counters, attributes, nested objects,
closures, globals and tensors in place, under branches and loops. Each is called four times in turn with the plain
function on a world of its own.
After each call the results, the gradients and all that can be reached from the world are the same: values, types,
dtypes, strides, order of keys, and which things are one object or share memory. What cannot be captured runs eagerly,
which is no failure here.
"""

from __future__ import annotations

import itertools
import linecache
import types
from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusejit import jit

CALLS = 4
SERIAL = itertools.count()
WORLD = """
import torch
from collections import Counter, OrderedDict, defaultdict, deque
from torch import nn

GN = 0
GLIST = []
GDICT = {"a": 1}

class Meter:
    kind = 1
    def __init__(self):
        self.n, self.total, self.log, self.last = 0, torch.zeros(2, 3), [], None
    def update(self, value):
        self.n += 1
        self.total = self.total + value
        self.log.append(value)

class Slotted:
    __slots__ = ("n", "items")
    def __init__(self):
        self.n, self.items = 1, []

def note(value):
    GLIST.append(value)

def count():
    global GN
    GN += 1

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, 3))
        self.register_buffer("buf", torch.ones(3))
        self.lst, self.other, self.nums, self.nested = [], [1], [3, 1, 2], [[], {"k": []}]
        self.dct, self.dl, self.st, self.dq = {}, {}, {1}, deque(maxlen=3)
        self.ctr, self.dd, self.od = Counter(), defaultdict(list), OrderedDict(a=1, b=2)
        self.meter, self.objs, self.slotted = Meter(), [Meter(), Meter()], Slotted()
        self.n, self.flag, self.last, self.t = 0, True, None, torch.zeros(2, 3)

def world():
    global GN
    GN = 0
    GLIST.clear()
    GDICT.clear()
    cell_n, cell_list, cell_t = 0, [], torch.zeros(3)
    self = Net()
    queue = deque(maxlen=2)
    def push(value):
        cell_list.append(value)
    def enqueue(value):
        queue.append(value)
    def bump():
        nonlocal cell_n
        cell_n += 1
    def step(x):
        global GN
        nonlocal cell_n, cell_t
        y = x * self.w
%s
    return self, step, lambda: [self, cell_n, cell_list, cell_t, queue, GN, GLIST, GDICT, Meter.kind]
"""
TENSORS = (
    "y",
    "y * 2",
    "x",
    "y.detach()",
    "y.sum()",
    "self.buf",
    "y.t()",
    "y.double()",
    "x[0]",
    "self.w",
    "y.detach().view(-1)",
)
CONSTANTS = ("1", "2", "'a'", "None", "(1, 'b')", "2.5", "True")
CHANGES = (
    "self.lst.append({v})", "self.lst.insert(0, {v})", "self.lst.extend([{v}, {c}])", "self.lst.clear()",
    "self.lst += [{v}]",
    "self.lst = [{v}]", "self.other = self.lst", "self.lst.reverse()", "del self.lst[1:]",
    "self.lst[:0] = [{v}, {v}]",
    "if self.lst: self.lst.pop()", "if self.lst: self.lst[0] = {v}", "if self.lst: self.last = self.lst[-1]",
    "self.lst.append(self.lst[:])", "more = self.lst.append; more({v})", "self.other.append({v})",
    "self.lst.append(self.other)",
    "self.nums.append({i})", "self.nums.sort()", "self.nums.sort(reverse=True)", "self.nums[0] += 1",
    "self.nums.append(len(self.nums))",
    "self.nested[0].append({v})", "self.nested[1]['k'].append({c})", "self.nested[1]['k'] = [{v}]",
    "self.nested.append([{v}])",
    "self.dct[{k}] = {v}", "self.dct.pop({k}, None)", "self.dct.update(a={v}, b={c})", "self.dct.clear()",
    "self.dct = {{'z': {v}}}",
    "self.dct[{k}] = {{'in': {v}}}", "self.dct[{k}] = self.dct.pop({k}, {v})",
    "self.dl.setdefault({k}, []).append({v})",
    "self.st.add({c})", "self.st.discard(1)", "self.st.update([1, 2])", "self.st.clear()", "self.st |= {{{i}}}",
    "self.dq.append({v})", "self.dq.appendleft({c})", "self.dq.rotate(1)", "if self.dq: self.dq.popleft()",
    "self.ctr[{k}] += 1", "self.ctr.update(['a', 'b'])", "self.dd[{k}].append({v})", "self.od.move_to_end('a')",
    "self.od[{k}] = {v}",
    "self.n += 1", "self.n += x.shape[0]", "self.n = self.n + {i}", "self.n = {i}", "self.n -= 1",
    "self.flag = not self.flag",
    "self.last = {v}", "self.last = ({v}, {c})", "self.last = [self.lst, {v}]", "self.t = self.t + y.detach()",
    "self.t = y.detach()",
    "self.meter.n += 1", "self.meter.update(y.detach())", "self.meter.last = {v}", "self.meter.log = []",
    "self.meter.log.append({c})",
    "self.objs[0].n += 2", "self.objs[{b}].last = {v}", "self.objs[1].log.append({v})",
    "self.meter, self.objs[0] = self.objs[0], self.meter",
    "self.objs.append(Meter())", "self.meter = Meter()", "self.meter.meter = self.objs[1]", "self.slotted.n += 1",
    "self.slotted.items.append({v})",
    "if hasattr(self.meter, 'extra'): del self.meter.extra", "self.meter.extra = {v}",
    "setattr(self.meter, 'n', {i})",
    "self.__dict__['n'] = {i}", "vars(self.meter)['n'] += 1", "vars(self.meter)['log'].append({v})",
    "object.__setattr__(self, 'last', {v})",
    "object.__setattr__(self, 'n', self.n + 1)", "Meter.kind += 1", "type(self.meter).kind = {i}",
    "cell_n += 1", "cell_list.append({v})", "cell_list[:] = [{c}]", "cell_t = cell_t + y.detach().sum(0)",
    "push({v})", "enqueue({v})", "bump()", "note({v})", "count()", "cell_list.clear()",
    "GN += 1", "GN = {i}", "GLIST.append({v})", "GLIST.clear()", "GDICT[{k}] = {v}",
    "GDICT['n'] = GDICT.get('n', 0) + 1",
    "self.buf.add_(1)", "self.buf += y.detach().sum(0)", "self.buf.mul_(0.5)", "self.buf = self.buf + 1",
    "self.t.add_(1)", "cell_t.add_(1)",
    "for v in self.lst:\n    if isinstance(v, torch.Tensor) and not v.requires_grad: v.add_(1)",
)  # fmt: skip
READS = (
    "y = y + self.n", "y = y * (1 + len(self.lst))", "y = y + sum(self.nums)", "y = y + len(self.st)",
    "y = y + self.meter.n",
    "y = y * 0.5 + self.meter.total", "y = y + self.ctr['a']", "y = y + self.t", "y = y * self.buf",
    "y = y + cell_n", "y = y + cell_t", "y = y + len(cell_list)", "y = y + len(queue)",
    "y = y + GN", "y = y + len(GLIST)", "y = y + len(self.dq)", "y = y + Meter.kind", "y = y + self.slotted.n",
    "y = y + self.objs[0].n",
    "for v in self.lst:\n    if isinstance(v, torch.Tensor) and v.dim() == 2: y = y + v.sum()",
    "for v in self.dct.values():\n    if isinstance(v, torch.Tensor): y = y + v.sum()",
    "if torch.is_tensor(self.last): y = y + self.last.sum()", "if isinstance(self.last, tuple): y = y + 1",
    "y = y + len(self.nested[0])", "y = y + list(self.od).index('a')", "y = y + len(self.dl.get('a', []))",
    "y = y.tanh()", "x = x + 1",
    "if self.other is self.lst: y = y + 1", "y = y + len(self.meter.log)",
    "if hasattr(self.meter, 'extra'): y = y - 1",
)  # fmt: skip
TESTS = (
    "self.flag",
    "self.n % 2 == 0",
    "len(self.lst) > 1",
    "GN > 1",
    "x.shape[0] == 2",
    "y.sum() > 0",
    "self.last is None",
    "cell_n",
)
RETURNS = ("y", "y, self.lst", "{'y': y, 'd': self.dct}", "[y, y.view(-1)]", "y, x", "y, self.nested[0], self.last",
           "y, [y * 2, {'n': self.n}]",
           "y, self.dq, self.other", "y, self.t, self.buf")  # fmt: skip


@st.composite
def statement(draw: Any, depth: int = 1) -> list[str]:
    kind = draw(st.integers(0, 9))
    if kind == 0 and depth:
        test, body = draw(st.sampled_from(TESTS)), draw(block(depth - 1))
        other = draw(st.one_of(st.none(), block(depth - 1)))
        return [
            f"if {test}:",
            *("    " + line for line in body),
            *(["else:", *("    " + line for line in other)] if other else []),
        ]
    if kind == 1 and depth:
        return [f"for i in range({draw(st.integers(1, 2))}):", *("    " + line for line in draw(block(depth - 1)))]
    text = draw(st.sampled_from(READS if kind > 6 else CHANGES))
    if kind <= 6:
        value = draw(st.sampled_from(TENSORS + CONSTANTS[:3]))
        key, constant = draw(st.sampled_from(("'a'", "'b'", "1"))), draw(st.sampled_from(CONSTANTS))
        text = text.format(v=value, c=constant, k=key, i=draw(st.integers(0, 4)), b=draw(st.integers(0, 1)))
    return text.split("\n")


def block(depth: int) -> Any:
    return st.lists(statement(depth), min_size=1, max_size=3).map(
        lambda found: [line for lines in found for line in lines]
    )


@st.composite
def program(draw: Any) -> str:
    lines = [line for lines in draw(st.lists(statement(2), min_size=1, max_size=6)) for line in lines]
    return "\n".join([*lines, f"return {draw(st.sampled_from(RETURNS))}"])


def load(text: str) -> types.SimpleNamespace:
    """A world of its own, with its function."""
    source = WORLD % "\n".join("        " + line for line in text.split("\n"))
    name = f"<state law {next(SERIAL)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope: dict[str, Any] = {"__name__": name}
    exec(compile(source, name, "exec"), scope)
    self, step, state = scope["world"]()
    return types.SimpleNamespace(self=self, step=step, state=state, name=name)


class Twins:
    """Compares two worlds, thing by thing; which ones are the same object in the one have to be so in the other."""

    def __init__(self, arms: bool = False) -> None:
        # both arms of an `if` on a tensor run: what it chooses is a tensor of its own, where eager's is one of the
        # arms'
        self.arms = arms
        self.twin: dict[int, int] = {}
        self.back: dict[int, int] = {}
        self.pins: list[Any] = []

    def paired(self, one: Any, other: Any, where: str) -> bool:
        """Whether two things have been met as twins already."""
        known = id(one) in self.twin
        assert self.twin.setdefault(id(one), id(other)) == id(other), f"{where}: identity"
        assert self.back.setdefault(id(other), id(one)) == id(one), f"{where}: identity"
        self.pins += [one, other]
        return known

    def memory(self, one: Any, other: Any, where: str) -> None:
        a, b = ("memory", one.untyped_storage()._cdata), ("memory", other.untyped_storage()._cdata)
        assert self.twin.setdefault(a, b) == b and self.back.setdefault(b, a) == a, f"{where}: memory"  # type: ignore[call-overload]

    def same(self, one: Any, other: Any, where: str) -> None:
        if (
            isinstance(one, type)
            or type(one).__name__ == type(other).__name__
            and type(one).__module__.startswith("<state law")
        ):
            assert getattr(one, "__qualname__", "") == getattr(other, "__qualname__", ""), where
        else:
            assert type(one) is type(other), f"{where}: {type(one)} is not {type(other)}"
        if isinstance(one, torch.Tensor):
            self.same_tensor(one, other, where)
        elif isinstance(one, (list, tuple, deque)):
            assert len(one) == len(other), f"{where}: {len(one)} items, not {len(other)}"
            if isinstance(one, tuple) or not self.paired(one, other, where):
                for n, (a, b) in enumerate(zip(one, other)):
                    self.same(a, b, f"{where}[{n}]")
        elif isinstance(one, dict):
            assert [*one] == [*other], f"{where}: keys {[*one]}, not {[*other]}"
            if not self.paired(one, other, where):
                for key in one:
                    self.same(one[key], other[key], f"{where}[{key!r}]")
        elif isinstance(one, set):
            assert one == other, where
            self.paired(one, other, where)
        elif hasattr(one, "__dict__") and not isinstance(one, type) or hasattr(type(one), "__slots__"):
            if not self.paired(one, other, where):
                names = [*vars(one)] if hasattr(one, "__dict__") else [*type(one).__slots__]
                assert not hasattr(one, "__dict__") or {*names} == {*vars(other)}, (
                    f"{where}: {sorted({*names} ^ {*vars(other)})}"
                )
                for name in names:
                    self.same(getattr(one, name), getattr(other, name), f"{where}.{name}")
        else:
            assert one == other, f"{where}: {one} is not {other}"

    def same_tensor(self, one: torch.Tensor, other: torch.Tensor, where: str) -> None:
        if self.paired(one, other, where):
            return
        assert one.requires_grad == other.requires_grad, f"{where}: requires_grad {one.requires_grad}"
        facts = [(t.dtype, t.shape, t.stride(), t.storage_offset(), t.is_leaf) for t in (one, other)]
        assert facts[0] == facts[1], f"{where}: {facts}"
        if not self.arms:
            self.memory(one, other, where)
        torch.testing.assert_close(one, other, msg=lambda text: f"{where}: {text}", equal_nan=True)


def run(world: Any, call: Any, number: int) -> tuple[Any, Any, torch.Tensor]:
    base = torch.full((2, 3), 0.25 * (number + 1)).requires_grad_(number != 1)
    x = base * 1
    try:
        out = call(x)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        return type(error).__name__, [], x
    y = out if isinstance(out, torch.Tensor) else out["y"] if isinstance(out, dict) else out[0]
    leaves = [t for t in (base, world.self.w) if t.requires_grad]
    if not y.requires_grad:
        return out, [], x
    total = (y.float() * torch.arange(1.0, 7.0).reshape(2, 3)).sum()
    try:
        return out, list(torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)), x
    except RuntimeError:  # the program has changed in place what its gradient needs
        return out, None, x


def play(text: str, **options: Any) -> bool:
    """Call both four times; whether all of it ran captured."""
    eager, mine = load(text), load(text)
    jitted = jit(mine.step, **options)
    twins = Twins("y.sum() >" in text)
    for number in range(CALLS):
        wanted, got = run(eager, eager.step, number), run(mine, jitted, number)
        got = got if wanted[1] is not None else (got[0], None, got[2])
        for what, one, other in zip(("result", "gradient", "argument"), got, wanted):
            twins.same(one, other, f"{text}\ncall {number}, {what}")
        twins.same(mine.state(), eager.state(), f"{text}\ncall {number}, state")
    for world in (eager, mine):
        linecache.cache.pop(world.name)
    return not jitted.cache_info().fallbacks


CAPTURED = (
    "self.lst.append(y)",
    "self.lst.clear()\nself.lst.append(y)\nself.lst.extend([x, 1])",
    "self.n += 1",
    "self.n += x.shape[0]",
    "self.st.add('a')",
    "self.meter.update(y.detach())",
    "cell_list.append(y * 2)",
    "push(y)",
    "note(y.sum())",
    "self.dct['a'] = {'in': [y, 1]}",
    "self.dq.append(y)\nself.dq.clear()",
    "self.objs[1].log.append(y)",
    "self.last = self.lst",
    "self.lst = [y]\nself.lst.append(x)",
    "self.slotted.items = [y]",
    "self.od.move_to_end('b')",
    "self.lst[:] = [y, y]",
    "GDICT['b'] = y",
    "self.meter.last = Meter()",
    "cell_t = cell_t + 1",
    "self.nested[1]['k'] = [y]",
)
"""Programs that no call runs eagerly."""


@pytest.mark.parametrize("text", CAPTURED)
def test_captured(text: str) -> None:
    assert play(f"{text}\nreturn y, x", fullgraph=True)


LAW: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.filterwarnings("ignore")
@given(program(), st.sampled_from(("ast", "trace")))
@settings(max_examples=190, derandomize=True, **LAW)
def test_state_is_as_in_eager(text: str, mode: str) -> None:
    play(text, capture_mode=mode)


@pytest.mark.filterwarnings("ignore")
@given(program())
@settings(max_examples=10, derandomize=True, **LAW)
def test_state_is_as_in_eager_with_kernels(text: str) -> None:
    play(text, backend="interpret", numerics="eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@given(program(), st.sampled_from(("ast", "trace")))
@settings(max_examples=5000, **LAW)
def test_state_of_many_programs(text: str, mode: str) -> None:
    play(text, capture_mode=mode)
