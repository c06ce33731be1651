"""Launchers of kernels whose sizes vary: the grid, the bucket of a row's length and the divisibility of sizes are found
at each launch.

In: a kernel's text, its parameter types (pointers, then sizes) and its tiles. Out: a `SizedLauncher`.

    >>> row = sized_kernel(source, name="row_0", params=("*fp32", "*fp32", "i32"), tiles=[(64, {"XBLOCK": 4,
        "RBLOCK": 64}, 1, 1), ...])
    >>> row((rows, 1, columns), x, out, columns)

The text is one. Each bucket, and each set of sizes that are multiples of 16, is compiled when a launch first needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CompileError
from .compile_workers import KernelSpec
from .launch import Launcher

Tiles = tuple[int | None, Mapping[str, int], int, int]
"""(longest row, or None for all; constants; warps; stages)."""
KEPT = 256
"""Launchers of one kernel that are kept for sizes that come again."""


class SizedLauncher:
    """A kernel for many sizes. Call it with (how many values x, y and r have), the tensors and the sizes.

    Attributes:
        compiled: the specs that launches have needed so far: at most one a bucket and a pattern of divisibility.

    Raises:
        CompileError: a row is longer than every bucket, or as of `Launcher`.
    """

    def __init__(self, base: KernelSpec, tiles: Sequence[Tiles], own: tuple[int, ...] = ()) -> None:
        self.base, self.tiles, self.own = base, tuple(tiles), own
        self.pointers = sum(kind.startswith("*") for kind in base.params)
        self.compiled: dict[tuple[int, tuple[bool, ...]], KernelSpec] = {}
        self.kept: dict[Any, Launcher] = {}
        self.launchers: dict[Any, Launcher] = {}
        kinds = base.params[self.pointers :]
        self.floats = any(kind == "fp64" for kind in kinds)
        self.whole = tuple(self.pointers + n for n, kind in enumerate(kinds) if kind != "fp64")

    def __repr__(self) -> str:
        return f"SizedLauncher({self.base.name}, {len(self.compiled)} variants)"

    def __call__(self, extents: tuple[int, int, int], *args: Any) -> None:
        # a float, a learning rate that decays, is new in each launch and chooses nothing
        sizes = tuple([args[n] for n in self.whole]) if self.floats else args[self.pointers :]
        found = self.kept.get((extents, sizes))
        if found is None:
            if 0 in extents[:2]:
                return
            found = self.launcher(extents, sizes, args[self.pointers :])
        found(*args)

    def launcher(self, extents: tuple[int, int, int], sizes: tuple, numbers: tuple) -> Launcher:
        """Find the launcher for one set of sizes, and keep it for when they come again."""
        bucket = self.bucket(extents[2])
        even = tuple([type(number) is int and not number % 16 for number in numbers])
        grid = self.grid(extents, bucket)
        for table in (self.kept, self.launchers):
            if len(table) >= KEPT:
                table.clear()
        found = self.launchers.get((bucket, even, grid))
        if found is None:
            found = self.launchers[bucket, even, grid] = Launcher(self.spec(bucket, even), grid, self.own)
        self.kept[extents, sizes] = found
        return found

    def bucket(self, length: int) -> int:
        """Return which tiles a row of this length takes."""
        for number, (limit, *_) in enumerate(self.tiles):
            if limit is None or length <= limit:
                return number
        raise CompileError(f"kernel {self.base.name}: a row of {length} is longer than its {self.tiles[-1][0]}")

    def grid(self, extents: tuple[int, int, int], bucket: int) -> tuple[int, int, int]:
        blocks = self.tiles[bucket][1]
        return (-(-extents[0] // blocks["XBLOCK"]) * -(-extents[1] // blocks.get("YBLOCK", 1)), 1, 1)

    def spec(self, bucket: int, even: tuple[bool, ...]) -> KernelSpec:
        found = self.compiled.get((bucket, even))
        if found is None:
            _, blocks, warps, stages = self.tiles[bucket]
            b = self.base
            aligned = (True,) * self.pointers + even
            found = KernelSpec(
                b.source, b.name, b.params, tuple(blocks.items()), warps, stages, b.debug, aligned, b.fp_fusion
            )
            self.compiled[bucket, even] = found
        return found


def sized_kernel(
    source: str,
    *,
    name: str,
    params: Sequence[str],
    tiles: Sequence[Tiles],
    debug: bool = False,
    fp_fusion: bool = True,
    own: Sequence[int] = (),
) -> SizedLauncher:
    """Return the launcher of a kernel for many sizes; arguments as of `fusejit.runtime.launch.kernel`."""
    return SizedLauncher(KernelSpec(source, name, tuple(params), (), 1, 1, debug, (), fp_fusion), tiles, tuple(own))
