"""Every template with everything that a template's tiles decide: random numbers, scans, masks, indices, float8,
assertions.

Each test says which template it means to draw, and fails if another was drawn: a fact of a template that no test draws
is a fact untested.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fusejit import jit
from fusejit.templates import reduction_persistent

FP8 = torch.float8_e4m3fn


# {what a template decides: (x, i) to a value of x's shape}
FEATURES = {
    "random": lambda x, i: x + torch.rand_like(x),
    "dropout": lambda x, i: F.dropout(x, 0.5),
    "scan": lambda x, i: x.cumsum(-1),
    "mask": lambda x, i: x.tril(1) + F.pad(x, (2, 0))[:, : x.shape[1]],
    "index": lambda x, i: torch.gather(x, 1, i),
    "float8": lambda x, i: x.clamp(-4, 4).to(FP8).float(),
    "assertion": lambda x, i: x * torch.bernoulli(probability(x)),
}
# {a feature that draws: (x, numbers) to the same value}
DRAWN = {
    "random": lambda x, numbers: x + numbers,
    "dropout": lambda x, numbers: x * (numbers >= 0.5) * 2,
    "assertion": lambda x, numbers: x * (numbers < probability(x)),
}


def probability(x):
    return x.detach().clamp(0, 1)


def normed(y):
    return y / (1 + y.square().sum(-1, keepdim=True))


def mixed(y):
    """One read, reduced along rows and along columns."""
    return y.square().sum(-1), y.sum(0)


# {name: (template, (f, x, i, z, s) to the results, shape, longest row in registers)}; z is read transposed, s is one
# value a row
FORMS = {
    "flat": ("pointwise", lambda f, x, i, z, s: f(x, i), (24, 40), 0),
    "tile": ("pointwise_2d", lambda f, x, i, z, s: f(x, i) + z.t(), (96, 136), 0),
    "tile of several axes": (
        "pointwise_2d", lambda f, x, i, z, s: (f(x, i).view(4, 8, -1) + z.view(-1, 4, 8).permute(1, 2, 0)), (32, 64), 0,
    ),
    "line": ("pointwise_row", lambda f, x, i, z, s: f(x, i) * s, (6, 1536), 0),
    "row": ("reduction_persistent", lambda f, x, i, z, s: normed(f(x, i)), (12, 96), 0),
    "odd row": ("reduction_persistent", lambda f, x, i, z, s: normed(f(x, i)), (9, 517), 0),
    "column": ("reduction_persistent", lambda f, x, i, z, s: f(x, i).sum(0), (40, 24), 0),
    "loop": ("reduction_looped", lambda f, x, i, z, s: normed(f(x, i)), (5, 2560), 64),
    "odd loop": ("reduction_looped", lambda f, x, i, z, s: normed(f(x, i)), (5, 2571), 64),
    "column loop": ("reduction_looped", lambda f, x, i, z, s: f(x, i).sum(0), (500, 24), 0),
    "both": ("reduction_mixed", lambda f, x, i, z, s: mixed(f(x, i)), (2048, 256), 0),
    "segments": ("reduction_persistent", lambda f, x, i, z, s: segments(f(x, i)), (8, 96), 0),
    "each": ("foreach", lambda f, x, i, z, s: (f(x, i), f(z, i.t().contiguous())), (16, 24), 0),
}  # fmt: skip


def segments(y):
    """Blocks of a row, and the row."""
    blocks = y.view(y.shape[0], -1, 16)
    return (blocks / (1 + blocks.abs().amax(-1, keepdim=True))).flatten(1) + y.sum(-1, keepdim=True)


# {(form, feature): why no kernel of this form has it}
NEVER = {
    ("flat", "scan"): "a scan needs a row",
    ("tile", "scan"): "a scan needs a row",
    ("tile of several axes", "scan"): "a scan needs a row",
    ("line", "scan"): "a scan needs a row",
    **{
        ("each", f): "foreach takes lines of memory alone"
        for f in ("scan", "random", "dropout", "mask", "index", "assertion")
    },
    ("both", "scan"): "a walk over rows holds no scan",
    ("column", "scan"): "a scan along rows beside a sum of columns is a row's kernel and a column's",
    ("column loop", "scan"): "a scan along rows beside a sum of columns is a row's kernel and a column's",
}
CASES = [(form, feature) for form in FORMS for feature in FEATURES if (form, feature) not in NEVER]


def leaves(value):
    return value if isinstance(value, tuple) else (value,)


def arguments(shape, device):
    x, z = torch.randn(shape, device=device), torch.randn(shape[::-1], device=device)
    i = torch.randint(0, min(shape), shape, device=device)
    return x.requires_grad_(), i, z.requires_grad_(), torch.randn(shape[0], 1, device=device)


def given_numbers(feature, fuse, x, z):
    """The feature with the numbers that a kernel draws which does nothing else: one stream, whatever the template."""
    torch.manual_seed(3)
    drawn = fuse(lambda x, z: (torch.rand_like(x), torch.rand_like(z)), jit_level="O1")(x.detach(), z.detach())
    numbers = {tuple(n.shape): n for n in drawn}
    return lambda x, i: DRAWN[feature](x, numbers[tuple(x.shape)])


@pytest.mark.parametrize(("form", "feature"), CASES, ids=lambda word: word.replace(" ", "-"))
def test_feature_in_template(form, feature, fuse, device, monkeypatch):
    template, shape_of, shape, longest = FORMS[form]
    if longest:
        monkeypatch.setattr(reduction_persistent, "MAX_ROW", longest)
    f = FEATURES[feature]
    x, i, z, s = arguments(shape, device)
    fused = fuse(lambda x, i, z, s: shape_of(f, x, i, z, s), fullgraph=True)
    torch.manual_seed(3)
    ours = leaves(fused(x, i, z, s))
    assert template in {k.template for k in fused.program(x, i, z, s).kernels}, "the test drew another template"
    right = leaves(shape_of(given_numbers(feature, fuse, x, z) if feature in DRAWN else f, x, i, z, s))
    for one, other in zip(ours, right, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5 * max(1, shape[0] // 64))
    tangents = [torch.randn_like(one) for one in ours]
    gradients = torch.autograd.grad(ours, (x, z), tangents, allow_unused=True)
    for one, other in zip(gradients, torch.autograd.grad(right, (x, z), tangents, allow_unused=True), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)


# {layout: (n, m) to a tensor of that shape that runs through memory in its own way}
LAYOUTS = {
    "rows": lambda n, m: torch.randn(n, m),
    "columns": lambda n, m: torch.randn(m, n).t(),
    "every other": lambda n, m: torch.randn(n, 2 * m)[:, ::2],
    "part": lambda n, m: torch.randn(n + 3, m + 5)[3:, 5:],
    "one row": lambda n, m: torch.randn(m).expand(n, m),
    "one column": lambda n, m: torch.randn(n, 1).expand(n, m),
    "blocks": lambda n, m: torch.randn(2, n, m)[1],
}


@pytest.mark.full
@settings(max_examples=20, deadline=None, derandomize=True)
@given(*(st.sampled_from(sorted(LAYOUTS)),) * 3, st.integers(1, 300), st.integers(1, 300), st.booleans())
def test_masks_agree(value, other, tangent, rows, columns, multiples):
    """What dropout keeps forward is what has a gradient, whichever templates the two passes draw."""
    n, m = (rows + 3) // 4 * 4 if multiples else rows, (columns + 3) // 4 * 4 if multiples else columns
    y, x = LAYOUTS[value](n, m).clone(memory_format=torch.preserve_format).requires_grad_(), LAYOUTS[other](n, m)
    out = jit(lambda y, x: F.dropout(y + 10, 0.5) + x * 0, backend="interpret")(y, x)
    out.backward(LAYOUTS[tangent](n, m).abs() + 1)
    assert torch.equal(out != 0, y.grad != 0)
