"""What needs no GPU to be shown of the kernel benchmarks: every rule of perf/lib/criteria.py, on a part of the cases
here, on all with --slow.

The rules: 0 spills, one read of each input a pass and one pass up to 32K columns, 16 bytes at a time where the strides
allow, bytes within the stated limit, launches that fill 132 multiprocessors. Launches are compared with torch.compile's
by `perf/static.py --peer`.
"""

from __future__ import annotations

from dataclasses import replace

import criteria
import pytest
import static
import torch
from cases import CASES, FAMILIES, FEW, VOCABULARY
from test_reduction_templates import for_h100, meta

TELLING = (1023, 4096, 32768, 128)  # odd, the middle, the longest row of one pass; a head's width


def _part():
    """Every family forward and backward at an odd, a middle and the longest length, one of the three in float32; what
    the targets name.
    """
    shapes = (*VOCABULARY, FEW, (16384, 1024, 128256))  # the last: logits in parts
    named = [
        c for c in CASES if c.shape in shapes and c.dtype is torch.bfloat16 or c.tier == 0 and c.shape == (16384, 16384)
    ]
    found = []
    for number, family in enumerate(FAMILIES):
        lengths = [n for n in TELLING if n in family.lengths] + [
            n for n in (4097,) if 1023 not in family.lengths and n in family.lengths
        ]
        for place, length in enumerate(lengths):
            dtype = torch.float32 if place == number % 3 else torch.bfloat16
            found.append(
                next(
                    c
                    for c in CASES
                    if c.family is family and c.length == length and c.dtype is dtype and c.pass_ == family.passes[-1]
                )
            )
    return named + found


def check(case):
    figures = static.ours(case, "sm_90")
    assert figures.violations == () and figures.spills == 0


@pytest.mark.parametrize("case", _part(), ids=lambda case: case.id)
def test_rules(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_rules_of_every_case(case):
    check(case)


# -- that a rule can be broken -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def softmax():
    (kernel,) = for_h100(lambda x: x.softmax(-1), meta(16384, 4096))
    return kernel


def changed(kernel, **fields):
    return replace(kernel, compiled=replace(kernel.compiled, **fields))


def test_the_kernel_as_it_is_breaks_no_rule(softmax):
    loads, stores = criteria.accesses(softmax.ptx)
    assert criteria.violations([softmax]) == []
    assert loads[0].by_width == {16: 4} and stores[1].by_width == {16: 4}  # 32 elements a thread, 8 an instruction


def test_a_second_read_is_seen(softmax):
    line = next(line for line in softmax.ptx.splitlines() if "ld.global.v4" in line)
    twice = changed(softmax, ptx=softmax.ptx.replace(line, "\n".join([line] * 5), 1))
    assert "read 2.0 times, 1 pass" in criteria.violations([twice])[0]


def test_narrow_accesses_are_seen(softmax):
    narrow = changed(softmax, ptx=softmax.ptx.replace("global.v4.b32", "global.b16"))
    assert [text.split(" is ")[1] for text in criteria.violations([narrow])] == [
        "loaded 2 bytes at a time",
        "stored 2 bytes at a time",
    ]


def test_spills_and_idle_multiprocessors_are_seen(softmax):
    assert "64 bytes spilled" in criteria.violations([changed(softmax, n_spills=64)])[0]
    assert "programs of" in criteria.violations([replace(softmax, grid=(64, 1, 1))])[0]


def test_bytes_beyond_the_limit_are_seen(softmax):
    case = next(c for c in CASES if c.id == "softmax-forward-bfloat16-16384x4096")
    read, written = static.least(case)
    assert criteria.of_case(case, [softmax], read, written) == []
    assert "moves 2.00 times the least" in criteria.of_case(case, [softmax], read // 2, written // 2)[0]


def test_an_argument_that_is_not_loaded_is_seen(softmax):
    none = changed(softmax, ptx="\n".join(line for line in softmax.ptx.splitlines() if "ld.global" not in line))
    assert "no load of it" in criteria.violations([none])[0]


def test_a_loop_may_read_its_rows_once_a_pass():
    (kernel,) = for_h100(lambda x: x.softmax(-1), meta(512, 131_072))
    assert criteria.passes(kernel) == 2 and criteria.violations([kernel]) == []


def test_a_row_with_a_fallback_is_a_failure():
    row = static.Row(CASES[0], 1, failed="CompileError: no")
    assert row.violations == ["failed: CompileError: no"]
    figures = static.Figures(2, 0, 1, 0, 1, 0.0, 0.0)
    assert static.Row(CASES[0], 1, figures, replace(figures, launches=1)).violations == ["2 launches, torch.compile 1"]


def test_more_bytes_than_the_peers_are_a_violation():
    figures = static.Figures(1, 0, 1, 0, 1, 0.0, 0.0, bytes_moved=10_000_000)
    row = lambda theirs: static.Row(CASES[0], 1, figures, replace(figures, bytes_moved=theirs))  # noqa: E731
    assert row(8_000_000).violations == ["10.0 MB moved, torch.compile 8.0"]
    assert row(9_990_000).violations == row(None).violations == []


def test_a_workspace_of_the_peers_is_written_and_read():
    """What torch.compile generates for the sums of rows and columns at once; its own count has neither the bytes nor
    the launches.
    """
    source = """
            workspace_0 = empty_strided_cuda((8388608, ), (1, ), torch.float32)
            buf3 = workspace_0[0 * (1024) * (4096) : (0 + 1) * (1024) * (4096)].view(1024, 4096).sum(dim=0).view([4096])
            buf5 = workspace_0[1 * (1024) * (4096) : (1 + 1) * (1024) * (4096)].view(1024, 4096).sum(dim=0).view([4096])
    """
    assert static._workspaces(source) == 2 * 8388608 * 4 and len(static.SUMMED.findall(source)) == 2


def test_kernels_of_parts_count_as_often_as_they_run():
    case = next(c for c in CASES if c.id == "linear_cross_entropy-both-bfloat16-16384x1024x128256")
    figures = static.ours(case, "sm_90")
    logits, parts = 2 * 16384 * 128256, 4
    assert figures.externs == 3 * parts and figures.bytes_read >= logits and figures.bytes_written >= logits
    read, _ = static.least(case)
    assert figures.bytes_moved <= 1.01 * (sum(static.least(case)) + criteria.in_parts(case, read))
