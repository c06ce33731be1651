"""`lazy_inline` and `no_inline`: blocks that are captured, differentiated and compiled once, however often they are
built.

In: a class of modules (or its `__init__`), or a function. Out: the same object, marked; the capture of a jitted
function that calls it writes each call as one node (see capture/regions/detect.py).

    >>> @fusejit.lazy_inline
    ... class Block(torch.nn.Module): ...
    >>> model = fusejit.jit(torch.nn.Sequential(*[Block() for _ in range(48)]))
    >>> model.explain(x).regions
    (Region(Block_0: 12 inputs, 1 outputs, 31 ops, 48 calls),)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..capture.regions.detect import MARK, Mark
from ..capture.tracer import LOCAL

POLICIES = (None, "front")


def lazy_inline(fn: Any = None, attrs: str | list[str] | None = None, policy: str | None = None) -> Any:
    """Capture the blocks of a class once: equal blocks become calls of one region, with the weights of each as
    arguments.

    Two blocks are equal when their classes, the shapes, dtypes, strides and devices of their tensors and arguments, the
    state of torch and every attribute, global and closure variable that their `forward` reads are; an attribute edited
    after `__init__` makes a region of its own. Regions may call regions. Three or more equal blocks in one container
    (`ModuleList`, `Sequential`, or children of one module) are found without this mark unless they are tiny.

    A region is a boundary: the last op of a block is not fused with the first of the next, except at O3. In return 48
    blocks compile about as fast as one. `policy="front"` captures the blocks in place, with fusion across them, also
    where they would be found without a mark.

    Args:
        fn: the class's `__init__`, or the class; None makes a decorator.
        attrs: name, or list of names, of attributes by which blocks are told apart in addition to what they read.
        policy: None keeps the blocks apart; "front" captures them in place.

    Raises:
        ValueError: `policy` or `attrs` is none of these. TypeError: `fn` is neither a class of modules nor a function.

    Named after MindSpore's decorator, which compares the arguments of `__init__` only.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: choose one of {', '.join(map(repr, POLICIES))}")
    if attrs is not None and not isinstance(attrs, (str, list)):
        raise ValueError(f"attrs={attrs!r}: give the name of an attribute, or a list of names")
    names = [attrs] if isinstance(attrs, str) else attrs or []
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise ValueError(f"attrs={attrs!r}: {wrong[0]!r} is not the name of an attribute")
    if fn is None:
        return functools.partial(lazy_inline, attrs=attrs, policy=policy)
    if not (isinstance(fn, type) and issubclass(fn, torch.nn.Module)) and not hasattr(fn, "__code__"):
        raise TypeError(f"fusejit.lazy_inline takes the __init__ of an nn.Module, or the class, not {fn!r}")
    setattr(fn, MARK, Mark(policy, tuple(names)))
    return fn


def no_inline(fn: Callable) -> Callable:
    """Capture a function once: later calls with equal arguments (modules among them compared as blocks are) call one
    region.

    Args:
        fn: a function of tensors, modules and Python values, nested in any pytree, with such results.

    Raises:
        TypeError: `fn` is no function.
    """
    if not hasattr(fn, "__code__"):
        raise TypeError(
            f"fusejit.no_inline takes a function, not {fn!r}: use fusejit.lazy_inline for a class of modules"
        )

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        regions = getattr(LOCAL, "regions", None)
        if regions is None or not regions.sees():
            return fn(*args, **kwargs)
        return regions.call(fn.__name__, Mark(), fn, lambda: fn(*args, **kwargs), args, kwargs)

    return call
