"""Nobody else's code: torch's own database of ops and sample arguments, forward and backward, fused against eager.

In CI one sample of most ops; `pytest tests/laws/test_opinfo.py --opinfo=all` runs up to eight float32 samples of every
op and rewrites `opinfo_summary.md`; `--opinfo-dtype=bfloat16` takes another dtype, for the elementwise ops and
reductions. A sample passes if its outputs and gradients are eager's up to rounding, or no farther from float64 than
twice eager's distance, and if whatever was not fused has a reason. Ops whose eager result differs from one call to the
next are compared in shape and dtype only; which those are is found by calling them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.utils._pytree as pytree
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo

import fusejit

SUMMARY = Path(__file__).with_name("opinfo_summary.md")
CATEGORIES = {UnaryUfuncInfo: "elementwise", BinaryUfuncInfo: "elementwise", ReductionOpInfo: "reduction"}
SAMPLES = 8  # of each op; CI takes the one in their middle, since the first is often a scalar
CI_OTHERS = 2  # CI runs every elementwise op and reduction, and one in so many of the others
FUSED_SHARE = 0.6
TOLERANCES = {torch.float64: 1e-11, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # beyond it, float64 decides

# Results that nothing defines: memory that was never written.
UNDEFINED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "resize_as_",
}


@dataclass
class Tally:
    samples: int = 0
    fused: int = 0
    called: int = 0
    eager: int = 0
    shape_only: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


TALLIES: dict[tuple[str, str], Tally] = {}
OPS = {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


def category(op) -> str:
    return next((name for kind, name in CATEGORIES.items() if isinstance(op, kind)), "other")


def dtype_of(config: pytest.Config) -> torch.dtype:
    return getattr(torch, config.getoption("--opinfo-dtype"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        dtype = dtype_of(metafunc.config)
        names = sorted(
            name
            for name, op in OPS.items()
            if dtype in op.dtypes and (dtype is torch.float32 or category(op) != "other")
        )
        if metafunc.config.getoption("--opinfo") == "ci":
            others = [name for name in names if category(OPS[name]) == "other"][::CI_OTHERS]
            names = [name for name in names if category(OPS[name]) != "other" or name in others]
        metafunc.parametrize("name", names)


# ---------------------------------------------------------------------------------------------------------------------
# one sample


def call_of(op, sample):
    """(function of the sample's tensors, those tensors): everything that is no tensor stays inside the function."""
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*tensors):
        flat = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            flat[place] = tensor
        args, kwargs = pytree.tree_unflatten(flat, spec)
        return sample.output_process_fn_grad(op(*args, **kwargs))

    tensors = [leaves[i] for i in places]
    for place in places:
        leaves[place] = None
    return call, tensors


def fresh(tensors, dtype=None):
    """Copies that share nothing, in `dtype` where they are real floats; what lies around a view in memory, and
    requires_grad, are kept.
    """
    return [
        copied(t, dtype if dtype and t.is_floating_point() else t.dtype).requires_grad_(t.requires_grad)
        for t in tensors
    ]


def copied(tensor, dtype):
    if tensor.layout != torch.strided:
        return tensor.detach().clone().to(dtype)
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage().clone())
    return memory.to(dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def outputs_of(call, tensors):
    return [o for o in pytree.tree_leaves(call(*tensors)) if isinstance(o, torch.Tensor)]


def evaluate(call, tensors):
    """(outputs, gradients of the tensors that require them, None where there is none)."""
    outputs = outputs_of(call, tensors)
    leaves, wanted = [o for o in outputs if o.requires_grad], [t for t in tensors if t.requires_grad]
    if not leaves or not wanted:
        return outputs, []
    generator = torch.Generator().manual_seed(1)
    tangents = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.device, o.dtype) for o in leaves]
    return outputs, list(torch.autograd.grad(leaves, wanted, tangents, allow_unused=True))


def close(got, wanted, exact) -> str:
    """ "" if `got` is right, what is wrong otherwise; `exact` is the float64 result, or None."""
    if got is None or wanted is None:
        rest = wanted if got is None else got
        return (
            ""
            if rest is None or not rest.any()
            else f"a gradient is {'missing' if got is None else 'there that eager does not have'}"
        )
    if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        return f"{got.dtype} {tuple(got.shape)} instead of {wanted.dtype} {tuple(wanted.shape)}"
    got, wanted = got.detach(), wanted.detach()
    try:
        tolerance = TOLERANCES.get(got.dtype, 2e-5)
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
        return ""
    except AssertionError as error:
        if exact is None or not got.is_floating_point() or exact.shape != got.shape:
            return str(error)
        exact = exact.detach()
        both = exact.isfinite() & got.isfinite() & wanted.isfinite()
        if not torch.allclose(got.where(~both, 0), wanted.where(~both, 0), equal_nan=True):
            return str(error)
        distance = lambda x: float((x.double() - exact).where(both, 0).abs().max())  # noqa: E731
        ulps = 2 * torch.finfo(got.dtype).eps * float(exact.where(both, 0).abs().max())
        if distance(got) <= 2 * distance(wanted) + ulps:
            return ""
        return f"{error}\ndistance from float64: {distance(got):.2e}, eager's {distance(wanted):.2e}"


def is_random(call, tensors) -> bool:
    """Some eager calls differ, once the seeds that some samples set themselves are taken from them."""
    results = set()
    for seed in range(4):  # two calls of an op with few outcomes may agree
        torch.manual_seed(seed)
        with mock.patch.object(torch, "manual_seed"):
            results.add(
                str([o.detach().tolist() for o in outputs_of(call, fresh(tensors)) if o.layout == torch.strided])
            )
    return len(results) > 1


def check(name, op, sample, fuse, tally) -> None:
    call, tensors = call_of(op, sample)
    try:
        wanted, wanted_gradients = evaluate(call, fresh(tensors))
    except (RuntimeError, NotImplementedError):
        tensors = [t.detach() for t in tensors]  # eager has no gradient for this sample
        wanted, wanted_gradients = evaluate(call, fresh(tensors))
    fused = fuse(call)
    got, gradients = evaluate(fused, fresh(tensors))
    assert len(got) == len(wanted), f"{len(got)} outputs instead of {len(wanted)}"
    tally.samples += 1
    record(tally, fused.explain(*fresh(tensors)))
    if op.name in UNDEFINED or is_random(call, tensors):
        tally.shape_only += 1
        assert [(o.shape, o.dtype) for o in got] == [(o.shape, o.dtype) for o in wanted]
        return
    exact, exact_gradients = exactly(call, tensors, len(wanted), len(wanted_gradients))
    for kind, triples in (
        ("output", zip(got, wanted, exact)),
        ("gradient", zip(gradients, wanted_gradients, exact_gradients)),
    ):
        for number, triple in enumerate(triples):
            wrong = close(*triple)
            assert not wrong, f"{name}, {kind} {number} of {describe(sample)}: {wrong}"


def exactly(call, tensors, outputs: int, gradients: int):
    """The results in float64, None for all where the op does not take it."""
    try:
        exact, exact_gradients = evaluate(call, fresh(tensors, torch.float64))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        exact, exact_gradients = [], []
    if len(exact) != outputs:
        exact = [None] * outputs
    return exact, exact_gradients if len(exact_gradients) == gradients else [None] * gradients


def record(tally: Tally, report) -> None:
    fallbacks = [
        fallback for fallback in report.fallbacks if fallback.op != "torch's runtime wrappers"
    ]  # those run kernels, too
    if fallbacks:
        tally.eager += 1
        for fallback in fallbacks:
            assert fallback.reason, f"a fallback without a reason: {fallback}"
            assert not fallback.op.startswith("compiling for"), f"an internal error: {fallback}"
            tally.reasons[f"{fallback.op}: {fallback.reason}"] += 1
    elif report.externs:
        tally.called += 1
    else:
        tally.fused += 1


def describe(sample) -> str:
    return (
        f"({', '.join(map(brief, (sample.input, *sample.args)))}, "
        f"{ ({k: brief(v) for k, v in sample.kwargs.items()}) })"
    )


def brief(value) -> str:
    return f"{value.dtype}{tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]


# ------------------------------------------------------------------------------------------------------------ the tests


def test_op(name: str, fuse, device, request) -> None:
    op = OPS[name]
    if name.startswith("jiterator") and device == "cpu":
        pytest.skip("torch's jiterator compiles for CUDA only")
    tally = TALLIES.setdefault((category(op), name), Tally())
    dtype = dtype_of(request.config)
    requires_grad = op.supports_autograd and dtype.is_floating_point
    samples = list(itertools.islice(op.sample_inputs(device, dtype, requires_grad=requires_grad), SAMPLES))
    if request.config.getoption("--opinfo") == "ci":
        samples = samples[len(samples) // 2 :][:1]
    for sample in samples:
        check(name, op, sample, fuse, tally)


def test_most_are_fused(request) -> None:
    """At least 60 % of the elementwise and reduction samples run as kernels alone; the whole database's table is
    written to a file.
    """
    mine = [tally for (kind, _), tally in TALLIES.items() if kind != "other"]
    samples, fused = sum(t.samples for t in mine), sum(t.fused for t in mine)
    whole = request.config.getoption("--opinfo") == "all" and dtype_of(request.config) is torch.float32
    if (
        whole
        and not request.session.testsfailed
        and len(TALLIES) > 0.95 * sum(torch.float32 in op.dtypes for op in OPS.values())
    ):
        SUMMARY.write_text(summary())
    if samples < 100:
        pytest.skip("needs the samples of test_op in the same run")
    assert fused / samples >= FUSED_SHARE, f"{fused} of {samples}"


def summary() -> str:
    lines = [
        "# torch's op database through fusejit",
        "",
        f"Written by `pytest tests/laws/test_opinfo.py --opinfo=all`; torch {torch.__version__}, fusejit "
        f"{fusejit.__version__}, float32,",
        f"forward and backward, at most {SAMPLES} samples an op. Every sample gave eager's result (where shape only: "
        "its shape and dtype).",
        "fused: kernels alone;",
        "called: some ops through torch inside the program; eager: the whole function through torch, with a recorded "
        "reason; shape only:",
        "the op is random or its result undefined.",
        "",
        "| kind | ops | samples | fused | called | eager | shape only |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in ("elementwise", "reduction", "other"):
        rows = [tally for (k, _), tally in TALLIES.items() if k == kind]
        totals = [sum(getattr(t, key) for t in rows) for key in ("samples", "fused", "called", "eager", "shape_only")]
        share = math.floor(100 * totals[1] / max(totals[0], 1))
        lines.append(
            f"| {kind} | {len(rows)} | {totals[0]} | {totals[1]} ({share} %) | "
            + " | ".join(map(str, totals[2:]))
            + " |"
        )
    lines += ["", "## Not fused, elementwise and reductions", ""]
    lines += [
        f"* `{name}`: {t.called} called, {t.eager} eager, of {t.samples}"
        for (k, name), t in sorted(TALLIES.items())
        if k != "other" and t.fused < t.samples
    ]
    reasons = sum((t.reasons for t in TALLIES.values()), Counter())
    lines += ["", "## Reasons for running a whole function eagerly", ""]
    lines += [f"* {count}x {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines) + "\n"
