"""The table of templates, in the order in which they are asked.

In: a cluster, or a group of them. Out: the template of the first row that applies.

    >>> template_for(cluster).name
    'reduction_persistent'
"""

from __future__ import annotations

from typing import Any

from ..codegen.ir.cluster import Cluster
from ..codegen.ir.graph import Foreach
from . import (
    foreach,
    foreach_reduction,
    pointwise,
    pointwise_2d,
    pointwise_row,
    reduction_looped,
    reduction_mixed,
    reduction_persistent,
)
from .base import Template

MODULES = (
    *(reduction_mixed, pointwise_2d, pointwise_row, pointwise, reduction_persistent, reduction_looped),
    *(foreach_reduction, foreach),
)
TEMPLATES: dict[str, Template[Any]] = {module.TEMPLATE.name: module.TEMPLATE for module in MODULES}


def named(name: str) -> Template[Any]:
    """Return the template of a schedule."""
    return TEMPLATES[name]


def template_for(step: Cluster | Foreach) -> Template[Any]:
    return next(t for t in TEMPLATES.values() if isinstance(step, t.takes) and t.applies(step))


def for_any_length() -> Template[Cluster]:
    """Return the template of clusters whose rows may have any length."""
    return next(t for t in TEMPLATES.values() if t.loops and t.takes is Cluster)
