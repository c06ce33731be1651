"""torch's private names: all in two files, all there in this torch, and a name that is gone is a recorded fallback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fusejit
from fusejit import torch_private as private
from fusejit.errors import Unsupported

ROOT = Path(private.__file__).parent
OWNERS = {ROOT / "torch_private.py", ROOT / "runtime" / "torch_private.py"}
PRIVATE = re.compile(r"\btorch(\.\w+)*\._(?!_)\w+")
# ops by the names that torch's documentation gives them
PUBLIC = re.compile(r"\btorch\.(ops\.|_foreach_|_assert_async|_is_zerotensor)")


def code(path: Path) -> str:
    """The text of a file without its strings and comments."""
    return re.sub(r'"""[\s\S]*?"""|"[^"\n]*"|#[^\n]*', "", path.read_text())


@pytest.mark.cheap
@pytest.mark.parametrize("path", sorted(set(ROOT.rglob("*.py")) - OWNERS), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_only_the_owners_read_private_names(path):
    assert [m[0] for m in PRIVATE.finditer(code(path)) if not PUBLIC.match(m[0])] == []


def test_every_name_is_there():
    assert [name for name, path in private.found() if path is None] == []


def test_every_name_is_read_somewhere():
    text = "\n".join(path.read_text() for path in ROOT.rglob("*.py") if path not in OWNERS)
    assert [name for name in private.NAMES if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize("name", [name for name, row in private.NAMES.items() if len(row.paths) > 1])
def test_every_second_path_does_the_same(name):
    row = private.NAMES[name]
    if name.startswith("cuda_"):
        pytest.skip(
            "needs a CUDA build of torch" if not torch.cuda.is_available() else "device numbers: see test_launch"
        )
    first, second = (private.resolve(path) for path in row.paths)
    if name in ("set_default_dtype",):
        return first(torch.float32), second(torch.float32)
    if name == "min_cut_rematerialization_partition":
        return None if first is second else pytest.fail("another partitioner")
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(not autocast):
            assert first() == second()
    return None


@pytest.fixture
def gone(monkeypatch):
    """Pretend that this torch lacks a name."""

    def pretend(name):
        row = private.NAMES[name]
        monkeypatch.delitem(vars(private), name, raising=False)
        paths = tuple(f"{path}_of_another_version" for path in row.paths)
        monkeypatch.setitem(private.NAMES, name, private.Private(paths, row.needed_by))

    return pretend


def test_a_name_that_is_gone_says_what_needs_it(gone):
    gone("infer_size")
    with pytest.raises(Unsupported, match=f"torch {re.escape(torch.__version__)} without .*infer_size.*needs it"):
        _ = private.infer_size


def test_a_call_whose_capture_needs_a_missing_name_runs_eagerly(gone):
    gone("use_lazy_graph_module")
    x = torch.randn(5)
    jitted = fusejit.jit(lambda x: x.sin() + 1)
    assert torch.equal(jitted(x), x.sin() + 1)
    assert "_use_lazy_graph_module" in jitted.explain(x).fallbacks[0].op
    with pytest.raises(fusejit.CaptureError, match="_use_lazy_graph_module"):
        fusejit.jit(lambda x: x.sin() + 1, fullgraph=True)(x)


def test_the_second_path_is_taken(monkeypatch):
    monkeypatch.delitem(vars(private), "is_grad_enabled", raising=False)
    monkeypatch.setitem(
        private.NAMES, "is_grad_enabled", private.Private(("torch._C.gone", "torch.is_grad_enabled"), "")
    )
    assert private.is_grad_enabled is torch.is_grad_enabled
    vars(private).pop("is_grad_enabled")


def test_other_names_are_no_attributes():
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = private.nothing_like_it
