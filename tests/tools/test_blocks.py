"""The blocks of `fusejit bench`: right in the interpreter at small shapes, compiled for sm_90 at real ones without
spills.
"""

from __future__ import annotations

import math
import re

import pytest
import torch

import fusejit
from fusejit.tools.bench import PASSES, errors, shared, table
from fusejit.tools.blocks import BLOCKS

CASES = [(name, pass_) for name, block in BLOCKS.items() for pass_ in PASSES if pass_ == "forward" or block.grad]
DTYPES = (torch.float32, torch.bfloat16)


def test_there_are_enough_blocks():
    assert len(BLOCKS) >= 12
    assert sum(block.grad for block in BLOCKS.values()) >= 10


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "pass_"), CASES)
def test_error_is_at_most_twice_eagers(name, pass_, dtype, backend, device):
    fused, eager, right = errors(BLOCKS[name], pass_, backend=backend, device=device, dtype=dtype)
    assert right, f"{fused:.2e} from float64, eager {eager:.2e}"


def test_dropout_drops_what_it_should(fuse, device):
    block = BLOCKS["dropout_residual_layer_norm"]
    x, residual, *rest, p = block.make((64, 64), device, torch.float32)
    stream = fuse(block.fn)(x, residual, *rest, 0.25)[1]
    dropped = (stream == residual).float().mean()
    assert abs(dropped - 0.25) < 0.03


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "pass_"), CASES)
def test_kernels_compile_well_for_sm_90(name, pass_, dtype, sm_90, spilled):
    block = BLOCKS[name]
    with torch.set_grad_enabled(pass_ == "both"):
        program = sm_90(block.fn, block.make_untouched(block.real, dtype))
    assert program.kernels
    for kernel in program.kernels:
        assert kernel.n_spills <= spilled, f"{kernel.name}: {kernel.n_spills} spills, {kernel.n_regs} registers"
        loads, stores = vectorisable(kernel)
        assert kernel.wide_loads >= loads and kernel.wide_stores >= stores, (
            f"{kernel.name}: {loads} + {stores} operands\n{kernel.table}"
        )


def vectorisable(kernel) -> tuple[int, int]:
    """How many loads and stores can move 16 bytes at a time: stride 1 along a tile, and that many elements a thread."""
    cluster, blocks = kernel.cluster, dict(kernel.constants)
    per_thread = math.prod(blocks.values()) // (32 * kernel.num_warps)
    rows, axes = len(cluster.parallel), cluster.axes

    def wide(layout, itemsize: int) -> bool:
        strides, n = layout.strides, 16 // itemsize
        fast = [a for a, s in enumerate(strides) if s == 1]
        if (
            not fast
            or fast[0] not in (len(axes) - 1, rows - 1)
            or per_thread < max(4, n)
            or axes[fast[0]] % n
            or layout.offset % n
        ):
            return False
        block = blocks["XBLOCK" if fast[0] < rows or "RBLOCK" not in blocks else "RBLOCK"]
        return (
            block >= n
            and all(s % n == 0 for a, s in enumerate(strides) if a != fast[0])
            and all(strides[a] != 0 for a in range(len(axes)))
        )

    loads = {
        (node.buffer, node.layout): wide(node.layout, node.dtype.itemsize)
        for loads in cluster.reads.values()
        for node in loads
        if not node.index
    }
    return sum(loads.values()), sum(wide(s.layout, s.dtype.itemsize) for s in cluster.stores)


def explained(name, pass_):
    block = BLOCKS[name]
    with torch.set_grad_enabled(pass_ == "both"):
        return fusejit.jit(block.fn, backend="interpret").explain(*block.make_untouched(block.real))


def test_eager_kernels_are_counted():
    assert [name for name, _ in explained("bias_gelu", "forward").eager] == ["aten.add.Tensor", "aten.gelu.default"]
    assert len(explained("swiglu", "forward").eager) == 2
    assert len(explained("swiglu", "both").eager) == 5


def test_calls_and_bytes_of_the_llama_block():
    report = explained("llama_block", "both")
    assert (
        shared(report)[0] == 23
    )  # 7 matmuls and an attention forward, twice as many matmuls and one attention backward
    assert report.bytes_minimum <= report.bytes_fused < report.bytes_eager


def test_bench_table_of_one_block():
    from fusejit.tools.bench import bench

    result = bench(["bias_gelu"])
    text = table(result)
    assert not result.failed, text
    assert [row.pass_ for row in result.rows] == ["forward", "both"]
    assert re.search(r"bias_gelu +forward +2 -> 1", text)
    with pytest.raises(KeyError, match="there are bias_gelu"):
        bench(["nothing"])
