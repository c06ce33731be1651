"""Blind uses: a container or a number is read only to be added to, so that what the call computes does not depend on
what it holds.

In: a frame that reads an attribute, or a code object and a variable's name. Out: what is done with the value: "append",
"+=", or "".

    >>> self.losses.append(loss)      # "append": the list's contents are not looked at
    >>> self.calls += 1               # "+=": nor is the number

Read off the bytecode behind the load: the method that is looked up next, or the addition whose result is stored where
it came from.
Whatever is not surely blind is "", and its value becomes a guard.
"""

from __future__ import annotations

import dis
import functools
import types
from collections import deque
from typing import Any

METHODS: dict[type, frozenset[str]] = {
    list: frozenset({"append", "extend", "clear"}),
    deque: frozenset({"append", "extend", "clear"}),
}
"""By type: methods that add to a container, or empty it, whatever it holds."""
ADDED = "+="
SKIPPED = ("CACHE", "EXTENDED_ARG", "RESUME", "NOP")
LOADS = ("LOAD_ATTR", "LOAD_METHOD")
VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
PLAIN = frozenset(
    {
        "LOAD_FAST",
        "LOAD_CONST",
        "LOAD_GLOBAL",
        "LOAD_DEREF",
        "LOAD_ATTR",
        "LOAD_METHOD",
        "BINARY_SUBSCR",
        "BINARY_OP",
        "PRECALL",
        "CALL",
        "PUSH_NULL",
        "KW_NAMES",
        "UNARY_NEGATIVE",
        "LOAD_FAST_BORROW",
        "LOAD_FAST_CHECK",
        "LOAD_SMALL_INT",
    }
)
"""Instructions of an expression that leave alone what lies below it on the stack."""


@functools.cache
def steps(code: types.CodeType) -> tuple[list[dis.Instruction], dict[int, int]]:
    """The instructions of a code, and the place of each by its offset."""
    found = [step for step in dis.get_instructions(code) if step.opname not in SKIPPED]
    return found, {step.offset: place for place, step in enumerate(found)}


def attribute_use(frame: types.FrameType, name: str, value: Any) -> str:
    """What a frame does with the attribute that it reads now."""
    kind = type(value)
    if kind is not int and not may_grow(value):
        return ""
    found, places = steps(frame.f_code)
    place = places.get(frame.f_lasti)
    if place is None or found[place].opname not in LOADS or found[place].argval != name:
        return ""
    return added_to(found, place) if kind is int else method_of(found, place, METHODS[kind])


def may_grow(value: Any) -> bool:
    """Whether what a container holds stays when something is added."""
    return type(value) in METHODS and getattr(value, "maxlen", None) is None


def method_of(found: list[dis.Instruction], place: int, methods: frozenset[str]) -> str:
    """The method that the next instruction looks up in what was loaded."""
    after = found[place + 1] if place + 1 < len(found) else None
    return after.argval if after is not None and after.opname in LOADS and after.argval in methods else ""


@functools.cache
def additions(code: types.CodeType) -> frozenset[int]:
    """The offsets of the instructions that store a sum where its first operand was loaded."""
    found, _ = steps(code)
    return frozenset(added_at(found, place) for place, step in enumerate(found) if step.opname in LOADS) - {-1}


def is_addition(frame: types.FrameType) -> bool:
    """Whether a frame stores such a sum now."""
    return frame.f_lasti in additions(frame.f_code)


def added_to(found: list[dis.Instruction], place: int) -> str:
    return ADDED if added_at(found, place) >= 0 else ""


def added_at(found: list[dis.Instruction], place: int) -> int:
    """The offset of the store where an attribute is loaded, added to, and stored in the same object; -1 elsewhere.

    `self.n += e`, `self.n = self.n + e`.
    """
    if not place:
        return -1
    owner = found[place - 1]
    copied = owner.opname == "COPY"
    depth = 0
    for number, step in enumerate(found[place + 1 :], place + 1):
        if step.opname == "BINARY_OP" and depth == 1:
            sum_of_it = step.argrepr in ("+", "+=") and stored(found, number + 1, copied, owner, found[place].argval)
            return found[number + 2].offset if sum_of_it else -1
        if step.opname not in PLAIN or step.is_jump_target:
            return -1
        depth += dis.stack_effect(step.opcode, step.arg)
        if depth < 1:
            return -1
    return -1


def stored(found: list[dis.Instruction], place: int, copied: bool, owner: dis.Instruction, name: str) -> bool:
    """Whether what was computed is stored under a name in the object that it was loaded from."""
    here = found[place : place + 2]
    if len(here) < 2 or here[1].opname != "STORE_ATTR" or here[1].argval != name:
        return False
    again = here[0].opname == owner.opname and here[0].argval == owner.argval and owner.opname.startswith("LOAD_FAST")
    return here[0].opname == "SWAP" and here[0].arg == 2 if copied else again


def variable_uses(code: types.CodeType, name: str, value: Any) -> frozenset[str]:
    """What a code does with a global or closure variable that holds a container; empty where it may look at what is in
    it.
    """
    if not may_grow(value):
        return frozenset()
    kind = type(value)
    found, _ = steps(code)
    uses = {
        method_of(found, place, METHODS[kind])
        for place, step in enumerate(found)
        if step.opname in VARIABLES and step.argval == name
    }
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    elsewhere = any(
        step.opname not in VARIABLES and step.argval == name and step.opname != "COPY_FREE_VARS" for step in found
    )
    seen = elsewhere or any(name in (*each.co_freevars, *each.co_names) for each in inner)
    return frozenset() if seen or "" in uses else frozenset(uses)
