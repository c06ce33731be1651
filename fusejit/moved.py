"""Moved: modules that users may know by an older name, in pickles, rendered programs and entry points.

In: an import of an old name. Out: the module under its new name, the same object: no class exists twice.

    >>> import fusejit.function; fusejit.function is fusejit.api.function
    True

The finder stands last among the importers, so that it is only asked for names that no file has.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

MOVED = {
    "fusejit.ahead": "fusejit.api.compile_for",
    "fusejit.backend": "fusejit.api.dynamo_backend",
    "fusejit.bench": "fusejit.tools.bench",
    "fusejit.blocks": "fusejit.tools.blocks",
    "fusejit.bytecode": "fusejit.api.dynamo_function",
    "fusejit.capture.ordered": "fusejit.capture.effect_ops",
    "fusejit.cli": "fusejit.tools.cli",
    "fusejit.config": "fusejit.knobs",
    "fusejit.explain": "fusejit.report.report",
    "fusejit.function": "fusejit.api.function",
    "fusejit.method": "fusejit.api.bound_method",
    "fusejit.module": "fusejit.api.module",
    "fusejit.programs": "fusejit.specialise.build",
    "fusejit.rewrites.batch": "fusejit.api.transforms",
    "fusejit.rewrites.by_hand": "fusejit.api.control_flow",
    "fusejit.rewrites.ensemble": "fusejit.api.stacked_modules",
    "fusejit.rewrites.exclude": "fusejit.frontend.exclude",
    "fusejit.rewrites.hypermap": "fusejit.api.hypermap",
    "fusejit.rewrites.jit_class": "fusejit.api.jit_class",
    "fusejit.rewrites.lazy_inline": "fusejit.api.lazy_inline",
    "fusejit.runtime.sized": "fusejit.runtime.launch_dynamic",
    "fusejit.runtime.tensors": "fusejit.runtime.program_support",
    "fusejit.runtime.torch_c": "fusejit.runtime.torch_private",
    "fusejit.runtime.workers": "fusejit.runtime.compile_workers",
    "fusejit.settings": "fusejit.options",
    "fusejit.sizes": "fusejit.specialise.dynamic",
    "fusejit.switch": "fusejit.api.disable",
    "fusejit.tracing": "fusejit.api.trace_function",
    "fusejit.variants": "fusejit.runtime.multiversion",
}
GROUPS = {name.rpartition(".")[0] for name in MOVED} - {
    "fusejit"
}  # folders that held them; one that is gone is an empty package


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the old names of MOVED."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in MOVED:
            return importlib.machinery.ModuleSpec(name, self)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name in GROUPS else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        if spec.name not in MOVED:
            return None
        module = importlib.import_module(MOVED[spec.name])
        spec.loader_state = module.__spec__  # the import system is about to replace it
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.name in MOVED:
            module.__spec__ = spec.loader_state


def install() -> None:
    """Let the old names be imported."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
    # a function has the name of its old module: importing the module again would put it in the function's place
    sys.modules.setdefault("fusejit.jit", sys.modules["fusejit.api.jit"])
