"""Fork locks: what a forked process finds of the locks of its parent.

In: a lock. Out: the same lock; in a forked child it is free, whoever held it in the parent.

    >>> lock = renewed(threading.Lock())
    >>> lock.acquire(); os.fork() == 0 and lock.locked()
    False

A thread that holds a lock while another forks does not exist in the child, where no one would ever release it. What
such a thread was in the middle of is of two kinds. Most locks here only keep several threads from compiling the same
thing: the child has what was published before, and compiles the rest itself (`renewed`). A capture however replaces
methods of classes, and a table of specialisations is written in several steps: a fork waits until these are whole again
(`awaited`).
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import Any

PATIENCE = 60.0
"""Seconds that a fork waits for a capture in another thread; longer means that the capture itself waits for the thread
that forks.
"""

_renewed: weakref.WeakSet[Any] = weakref.WeakSet()
_awaited: list[Any] = []
_forking = threading.local()


def renewed(lock: Any) -> Any:
    """Let a forked child find this `threading.Lock` or `RLock` free, unless the thread that forks holds it; returns the
    lock.
    """
    _renewed.add(lock)
    return lock


def awaited(lock: Any) -> Any:
    """Let forks of other threads wait until this `threading.RLock`, which belongs to a whole module, is free; returns
    the lock.
    """
    _awaited.append(lock)
    return lock


def _before() -> None:
    _forking.taken = [lock for lock in _awaited if lock.acquire(timeout=PATIENCE)]


def _after_in_parent() -> None:
    for lock in reversed(_forking.__dict__.pop("taken", [])):
        lock.release()


def _after_in_child() -> None:
    taken = _forking.__dict__.get("taken", [])
    _after_in_parent()
    for lock in _awaited:
        if not any(lock is other for other in taken):
            lock._at_fork_reinit()
    dynamo = getattr(
        sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None
    )  # torch renews it in no version yet
    for lock in [*_renewed, *([] if dynamo is None else [dynamo])]:
        if not (hasattr(lock, "_is_owned") and lock._is_owned()):
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
