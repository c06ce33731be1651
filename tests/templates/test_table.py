"""The table of templates: a template of its own needs a class and a text, and no other file knows its name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import fusejit
from fusejit.codegen.schedule.choice import Schedule
from fusejit.templates import table
from fusejit.templates.base import Template


class Backwards(Template):
    """The last program takes the first tile: 20 lines are all that a template needs."""

    name, prefix = "backwards", "back"
    begins, sides = {"x": "(tl.num_programs(0) - 1 - tl.program_id(0)){wide} * XBLOCK"}, {"x": ""}
    text = """@triton.jit
def {{ name }}({{ params }}, XBLOCK: tl.constexpr):
    # {{ note }}
    x = {{ begin.x }} + tl.arange(0, XBLOCK)
{%- for line in axes + rows[0] %}
    {{ line }}
{%- endfor %}
"""

    def applies(self, cluster):
        return not cluster.reduce

    def tiles(self, cluster, device):
        return [Schedule(self.name, (("XBLOCK", 16),), 1)]


@pytest.fixture
def backwards(monkeypatch):
    monkeypatch.setattr(table, "TEMPLATES", {"backwards": Backwards(), **table.TEMPLATES})


def f(x, y):
    return (x.sin() * y.t() + 1).tanh() + torch.where(y.t() > 0, x, y.t())


def drawn(x, y):
    return torch.nn.functional.dropout(x, 0.5) + y


@pytest.mark.parametrize("shape", [(5, 24), (33, 7), (1, 1)])
def test_a_template_of_ones_own_renders_and_runs(backwards, shape):
    x, y = torch.randn(shape), torch.randn(shape[::-1])
    jitted = fusejit.jit(f, backend="interpret")
    torch.testing.assert_close(jitted(x, y), f(x, y))
    (kernel,) = jitted.program(x, y).kernels
    assert kernel.template == "backwards" and kernel.name.startswith("back_")
    assert "tl.num_programs(0) - 1" in kernel.source and kernel.grid == (-(-x.numel() // 16), 1, 1)


def test_its_tiles_draw_the_stream_that_all_others_draw(monkeypatch):
    """Four numbers of a Philox call stand where the template says that a tile begins."""
    x, y = torch.randn(6, 32), torch.randn(6, 32)

    def run():
        torch.manual_seed(0)
        jitted = fusejit.jit(drawn, backend="interpret")
        return jitted(x, y), jitted.program(x, y).kernels[-1]

    expected, _ = run()
    monkeypatch.setattr(table, "TEMPLATES", {"backwards": Backwards(), **table.TEMPLATES})
    result, kernel = run()
    assert kernel.template == "backwards" and "rand_tile" in kernel.source
    assert torch.equal(result, expected)


def test_a_template_of_ones_own_takes_sizes_that_vary(backwards):
    jitted = fusejit.jit(lambda x: x.sin() * 2, backend="interpret", dynamic=True)
    for n in (7, 40, 129):
        x = torch.randn(n)
        torch.testing.assert_close(jitted(x), x.sin() * 2)


def test_every_template_has_a_module_with_its_text_and_its_row():
    folder = Path(table.__file__).parent
    texts = {path.name.removesuffix(".py.jinja") for path in folder.glob("*.py.jinja")} - {"program"}
    assert texts == set(table.TEMPLATES) == {path.stem for path in folder.glob("*.py")} - {"__init__", "base", "table"}


def test_no_other_file_holds_the_name_of_a_template():
    root = Path(fusejit.__file__).parent
    for path in root.rglob("*.py"):
        if path.parent.name == "templates":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Constant) and node.value in table.TEMPLATES
            assert not named, f"{path.relative_to(root)}:{node.lineno} says {node.value!r}"
