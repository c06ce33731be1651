"""Old module names: each resolves to the module that took its place, in imports, pickles and entry points."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import torch

import fusejit
from fusejit.moved import MOVED


def double(x):
    return 2 * x


def older(data: bytes, new: str, old: str) -> bytes:
    """A pickle of protocol 0 with the name that a module had when the pickle was written."""
    assert f"c{new}\n".encode() in data
    return data.replace(f"c{new}\n".encode(), f"c{old}\n".encode())


@pytest.mark.parametrize("name", MOVED)
def test_old_name_is_the_new_module(name):
    new = importlib.import_module(MOVED[name])
    spec = new.__spec__
    assert importlib.import_module(name) is new
    assert new.__name__ == MOVED[name] and new.__spec__ is spec and spec.name == MOVED[name]


def test_every_class_of_a_moved_module_is_there_once():
    assert importlib.import_module("fusejit.function").JitFunction is fusejit.JitFunction
    assert importlib.import_module("fusejit.rewrites.hypermap").HyperMap is fusejit.HyperMap


def test_the_function_keeps_its_name_before_its_old_module():
    code = (
        "import fusejit, fusejit.jit; assert callable(fusejit.jit); from fusejit.jit import jit; assert jit is "
        "fusejit.jit"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_what_never_was_is_still_missing():
    with pytest.raises(ModuleNotFoundError, match="fusejit.functions"):
        importlib.import_module("fusejit.functions")
    with pytest.raises(ModuleNotFoundError, match="fusejit.rewrites.functions"):
        importlib.import_module("fusejit.rewrites.functions")


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: fusejit.jit(double), {"api.function": "function", "options": "settings"}),
        (
            lambda: fusejit.jit(double, capture_mode="bytecode"),
            {"api.dynamo_function": "bytecode", "options": "settings"},
        ),
        (lambda: fusejit.trace(double), {"api.trace_function": "tracing", "options": "settings"}),
        (lambda: fusejit.jit(torch.nn.ReLU()), {"api.module": "module", "options": "settings"}),
        (lambda: fusejit.HyperMap(double), {"api.hypermap": "rewrites.hypermap"}),
    ],
    ids=["function", "bytecode", "trace", "module", "hypermap"],
)
def test_older_pickles(make, names):
    data = pickle.dumps(make(), protocol=0)
    for new, old in names.items():
        data = older(data, f"fusejit.{new}", f"fusejit.{old}")
    restored = pickle.loads(data)
    assert type(restored) is type(make())
    x = torch.tensor([1.0, 2.0])
    assert torch.equal(restored(x), make()(x))


@pytest.mark.parametrize("value", ["fusejit.backend:torch_backend", "fusejit.api.dynamo_backend:torch_backend"])
def test_backend_of_an_older_installation(value):
    backend = EntryPoint("fusejit", value, "torch_dynamo_backends").load()
    assert backend is importlib.import_module("fusejit.api.dynamo_backend").torch_backend


def test_command_of_an_older_installation():
    assert callable(EntryPoint("fusejit", "fusejit.cli:main", "console_scripts").load())
