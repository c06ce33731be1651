"""What `explain()` says of a call that compiles no kernels, and what notebooks show."""

from __future__ import annotations

import torch

import fusejit


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        for _ in range(4):
            x = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))).sigmoid()
        return x


def test_the_first_line_says_why_there_are_no_kernels():
    first = str(fusejit.jit(lambda x: x.exp() + 1).explain(torch.ones(4))).splitlines()[0]
    assert (
        "2 ops of torch" in first and "CUDA tensors only" in first and "'interpret'" in first and "compile_for" in first
    )
    with_kernels = str(fusejit.jit(lambda x: x.exp() + 1, backend="interpret").explain(torch.ones(4))).splitlines()[0]
    assert "1 kernel launches" in with_kernels and "CUDA tensors only" not in with_kernels


def test_ops_of_regions_count_as_often_as_they_are_called():
    """Four equal layers are one region: the bytes are those of the layers traced in place."""
    x, layers = torch.randn(8, 16), torch.nn.Sequential(*(Layer() for _ in range(4))).requires_grad_(False)
    regions = fusejit.jit(layers).explain(x)
    alone = fusejit.jit(layers[0]).explain(x)
    assert len(regions.regions) == 1 and regions.regions[0].calls == 4
    assert regions.bytes_eager == 4 * alone.bytes_eager and len(regions.eager) == 4 * len(alone.eager)


def test_notebooks_show_the_same_text():
    report = fusejit.jit(lambda x: (x < 1) & (x > 0), backend="interpret", name="<f>").explain(torch.ones(4))
    page = report._repr_html_()
    assert page.startswith("<details") and "&lt;f&gt; on backend interpret" in page and "<f>" not in page
