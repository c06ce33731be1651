"""Checkpoints: what `torch.utils.checkpoint` is to keep of a part of a function, as marks on the nodes that the part
makes.

In: a call of `checkpoint` while a function is captured. Out: the ops of its function in the graph, each with the marks
that torch's partitioner reads: `recompute` (computed again in the backward, or saved) and `ac_graph_id` (one number for
a part, so that what leaves it is saved).

    y = checkpoint(block, x, use_reentrant=False)
    # %linear.meta["recompute"], %linear.meta["ac_graph_id"]:  CheckpointPolicy.PREFER_RECOMPUTE, 7

Selective checkpoints ask their policy about each op of the joint graph: it names ops below autograd, which a capture
does not see yet.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointPolicy

from .. import torch_private as private
from ..errors import Unsupported

Tensor = torch.Tensor
LOCAL = threading.local()
NUMBERS = itertools.count(1)
REENTRANT: Any = checkpoints.CheckpointFunction
OTHER = "_checkpoint_without_reentrant_generator"
"""What `checkpoint` calls, if it is not the class above: its second `next` comes when the function has run."""


class Part(int):
    """The number of one checkpoint's part of a graph. `policy`: of (context, op, operands) to what becomes of the
    result, or None.
    """

    policy: Callable[..., Any] | None = None

    def __copy__(self) -> Part:
        return self

    def __deepcopy__(self, memo: Any) -> Part:
        return self


def marking_now() -> bool:
    """Whether this thread captures the part of a checkpoint."""
    return getattr(LOCAL, "depth", 0) > 0


@contextlib.contextmanager
def marking(policy: Callable[..., Any] | None = None) -> Iterator[None]:
    """Mark what is traced here; a part in another one is marked as the inner one's."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode: Any = get_proxy_mode()
    if mode is None:
        yield
        return
    part, graph = Part(next(NUMBERS)), mode.tracer.graph
    part.policy, last = policy, graph._root.prev
    LOCAL.depth = getattr(LOCAL, "depth", 0) + 1
    try:
        yield
    finally:
        LOCAL.depth -= 1
    node = graph._root.prev
    while node is not last and node.op != "root":
        if node.op == "call_function":
            node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
            node.meta.setdefault("ac_graph_id", part)
        node = node.prev


def policy_of(context_fn: Any) -> Callable[..., Any] | None:
    """The policy of a selective checkpoint; None of a plain one.

    Raises:
        Unsupported: its contexts are of another kind.
    """
    if context_fn is None or context_fn is checkpoints.noop_context_fn:
        return None
    policy = getattr(context_fn()[0], "policy_fn", None)
    if policy is None:
        reason = (
            "what they do to a part that runs twice is no choice of what to save; use "
            "create_selective_checkpoint_contexts"
        )
        raise Unsupported("torch.utils.checkpoint with contexts of its own", reason)
    return policy  # type: ignore[no-any-return]


def in_place(function: Callable, preserve: bool, *args: Any) -> Any:
    """A reentrant checkpoint: its results require grad where an argument does."""
    moving = any(isinstance(value, Tensor) and value.requires_grad for value in args)
    with marking(), torch.set_grad_enabled(moving and torch.is_grad_enabled()):
        return function(*args)


class Checkpoints:
    """While one thread captures: its checkpoints mark what they trace."""

    def __init__(self) -> None:
        self.before: Any = None

    def __enter__(self) -> None:
        LOCAL.depth = 0
        owner, original = threading.get_ident(), getattr(checkpoints, OTHER)
        named = inspect.signature(original)

        def marked(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != owner:
                return original(*args, **kwargs)
            return stepwise(policy_of(named.bind(*args, **kwargs).arguments.get("context_fn")))

        self.before = original
        setattr(checkpoints, OTHER, marked)

    def __exit__(self, *error: object) -> None:
        setattr(checkpoints, OTHER, self.before)
        LOCAL.depth = 0


def stepwise(policy: Callable[..., Any] | None) -> Iterator[None]:
    with marking(policy):
        yield


def decide(graph: torch.fx.Graph) -> None:
    """Ask the policies of selective checkpoints about the nodes of a joint graph's forward."""
    for node in graph.nodes:
        part = node.meta.get("ac_graph_id")
        if not isinstance(part, Part) or "recompute" not in node.meta or node.op != "call_function":
            continue
        if node.meta.get("partitioner_tag") == "is_backward":
            del node.meta["recompute"]
        elif part.policy is not None:
            node.meta["recompute"] = chosen(part.policy, node)


def chosen(policy: Callable[..., Any], node: torch.fx.Node) -> CheckpointPolicy:
    """What a policy says of a node, or of the op whose result the node takes out."""
    if not isinstance(node.target, private.OpOverload):
        source = node.args[0] if node.args and isinstance(node.args[0], torch.fx.Node) else None
        return (
            CheckpointPolicy.PREFER_RECOMPUTE
            if source is None
            else source.meta.get("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
        )
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("val"))
    said = policy(checkpoints.SelectiveCheckpointContext(is_recompute=False), node.target, *args, **kwargs)
    if isinstance(said, bool):
        return CheckpointPolicy.MUST_SAVE if said else CheckpointPolicy.PREFER_RECOMPUTE
    return said  # type: ignore[no-any-return]
