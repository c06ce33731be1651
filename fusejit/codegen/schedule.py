"""Schedule: how a cluster is tiled. A pure choice: any schedule of a cluster is correct.

In: a cluster. Out: the cluster with its axes in the order that memory likes, and a `Schedule`; no measurement, no GPU.

    Schedule(template='reduction_persistent', blocks=(('XBLOCK', 1), ('RBLOCK', 1024)), num_warps=4)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .cluster import Cluster, Iota, Load, Random, Scan, Segment
from .cost import Device, Schedule, choose, full, machine, row_operands
from .crossing import MAX_ROW, at_least, crossing, fast_axis, power_of_two, second_axis, spanned, tiles_2d
from .hinted import hinted
from .keep import kept_values, used_again
from .layout import permute
from .live import column_sums
from .peel import Peel, peel, tile_columns
from .realize import footprint
from .scans import scans
from .size import AnySize, hint, most, product

ADDING = 16  # bytes that additions in memory weigh: neighbours of one thread are one of them, half types alone a loop each
STAGED = 65536  # bytes of shared memory for the stages of a loop
LONG_LOOP = 1024  # what a loop whose length varies is tiled for, at least
MANY_ROWS = 4096  # what rows that are shared by programs are tiled for, where their number varies and the device was not full
WARP_VALUES = 32 * 4  # a tile that gives each lane of a warp 16 bytes of float32
WASTE = 4  # the last tile of a row may stand over its end by one part in so many
WALKED = 4096  # columns of a tile that 16 warps walk with
WALKED_BYTES = {16: 32768, 8: 65536}  # {warps: bytes of a row that they read twice without spills}
HELD_BYTES = 163840  # bytes of such a row and of its column sums together


@dataclass(frozen=True, slots=True)
class Template:
    """A row of TEMPLATES: the file that owns the control flow, when it applies, its tiles and where each of them begins.

    `begins`: {index variable: where a tile begins along it}, in the words that the file fills in too. A program counts from there on with
    `tl.arange`; `{wide}` widens a program's number, `{across}` is how many tiles lie side by side, "@" the number of the tile in a row
    that a walk takes in several. `sides`: {index variable: the side of the tile along which it runs}.
    """

    name: str
    applies: Callable[[Cluster], bool]
    tiles: Callable[[Cluster, Device], list[Schedule]]
    begins: dict[str, str]
    sides: dict[str, str]


def schedule(cluster: Cluster, device: Device | None = None) -> tuple[Cluster, Schedule]:
    """Return the cluster ready to render, and of the first template that applies the tiles that cost least."""
    device = device or machine()
    ordered = order(cluster.coalesced).coalesced  # joined first: axes that are one in memory are not torn apart for a small operand
    model = hinted(ordered)
    template = next(t for t in TEMPLATES if t.applies(model))
    if model is not ordered:
        return ordered, varying(ordered, model, template, device)
    return ordered, choose(ordered, template.tiles(ordered, device), device)


def varying(cluster: Cluster, model: Cluster, template: Template, device: Device) -> Schedule:
    """Return the schedule of a cluster whose sizes vary: good for larger ones too, and right for all.

    Where a row is kept in registers, there is one for each power of two that its length may fall under.
    """
    columns, length = product(cluster.reduce), product(model.reduce)
    if cluster.programs:
        by = taller(product(cluster.parallel), device)
        model = tall(replace(model, programs=most(cluster.programs)), by)
    # of few rows of one pass none gains from registers, and each may be long: pieces of one that was split are such rows
    few = isinstance(product(cluster.parallel), int) and product(cluster.parallel) <= 2 * device.sms and not model.held
    if not isinstance(columns, int) and (
        column_reduction(model) or template.tiles is _tile_looped or few and model.reduce
    ):  # as for longer ones
        other = replace(model, reduce=(max(length, min(LONG_LOOP, most(columns))), *(1 for _ in model.reduce[1:])))
        return choose(other, _tile_looped(other, device), device)
    flat = template.tiles is _tile_row  # a row may come to end within a tile
    tiles = choose(model, (_tile_pointwise if flat else template.tiles)(model, device), device)
    if tiles.template == "pointwise":  # a block for this call alone would be a small one
        block = max(256, tiles["XBLOCK"])
        return replace(tiles, blocks=(("XBLOCK", block),), num_warps=block // 256)
    if tiles.template != "reduction_persistent" or isinstance(columns, int):
        return tiles
    longest = 1 << (MAX_ROW // max(1, model.held)).bit_length() - 1
    if columns > longest:  # not in this call; from now on an assumption
        raise AssertionError("a persistent reduction was chosen for a row that is too long")
    found = []
    for limit in (1 << n for n in range(longest.bit_length())):
        other = replace(model, reduce=(limit, *(1 for _ in model.reduce[1:])))
        found.append((limit, replace(choose(other, _tile_persistent(other, device), device), choice=None)))
    return replace(tiles, buckets=tuple(found))


def taller(rows: AnySize, device: Device) -> int:
    """Return how many times as many rows tiles are chosen for as the call has that is compiled for: a number that varies may grow."""
    return 1 if isinstance(rows, int) or hint(rows) >= device.sms else -(-MANY_ROWS // hint(rows))


def tall(model: Cluster, by: int) -> Cluster:
    """Return a cluster with so many times as many rows."""
    return replace(model, parallel=(by * model.parallel[0], *model.parallel[1:])) if by > 1 else model


# -- axes ------------------------------------------------------------------------------------------------------------------------------
def order(cluster: Cluster) -> Cluster:
    """Sort the axes so that the innermost is the one along which the most bytes are neighbours."""
    model = hinted(cluster)
    cost = [_traffic(model, axis) for axis in range(len(cluster.axes))]
    split = len(cluster.parallel)
    parallel = sorted(range(split), key=lambda a: cost[a])
    runs = [n.number.layout.strides or () for n in cluster.order if isinstance(n, Segment) and isinstance(n.number, Iota)]
    reduce = sorted(range(split, len(cluster.axes)), key=lambda a: (not any(strides[a] for strides in runs), cost[a]))
    reduce = sorted(reduce) if scans(cluster) else reduce
    new = [*parallel, *reduce]
    if new == sorted(new):
        return cluster
    axes = cluster.axes
    return cluster.map(permute(axes, new), [axes[a] for a in parallel], [axes[a] for a in reduce])


def _traffic(cluster: Cluster, axis: int) -> tuple[float, ...]:
    """Rank an axis: small strides, weighted by bytes (stores twice), come last."""
    dense, steps = 0.0, 0.0
    for layout, size, weight in _accesses(cluster):
        stride = abs(layout[axis])
        if stride == 1:
            dense += size * weight
        steps -= size * weight * min(stride, 1 << 40) if stride else 0
    return (dense, steps)


def _accesses(cluster: Cluster) -> list[tuple[Any, int, int]]:
    """Return (strides, bytes, weight) of each load and store; the largest store decides ties, and what is added to decides."""
    found = [(n.layout.strides, footprint(n) * n.dtype.itemsize, 2) for n in cluster.order if isinstance(n, Load)]
    for s in cluster.stores:
        size = product(n for n, along in zip(cluster.axes, spanned(s), strict=True) if along)
        found.append((s.layout.strides, size * s.dtype.itemsize, ADDING if s.mode == "atomic_add" else 3))
    return found


# -- which template --------------------------------------------------------------------------------------------------------------------
def _pointwise(cluster: Cluster) -> bool:
    return not cluster.reduce


def _rows_of_one_value(cluster: Cluster) -> bool:
    """Operands with one value for each row, and rows long enough for programs of their own that read and check it once, as a scalar."""
    even = bool(row_operands(cluster)) and cluster.axes[-1] % 8 == 0  # rows of whole groups keep wide loads
    return (
        even and bool(_parts(cluster.axes[-1])) and all((s.layout.strides or (0,))[-1] and not (s.index or s.mode) for s in cluster.stores)
    )


def _two_fast_axes(cluster: Cluster) -> bool:
    """Two operands of some size run fastest along different axes, both long enough for a tile."""
    return not cluster.reduce and second_axis(cluster) is not None


def column_reduction(cluster: Cluster) -> bool:
    """Whether memory runs along the parallel axes: a column reduction."""
    split, axes = len(cluster.parallel), cluster.axes
    votes = 0
    for node in full(cluster):
        axis = fast_axis(node.layout.strides, axes)
        votes += 0 if axis is None else (footprint(node) if axis < split else -footprint(node))
    return votes > 0


def columns_at_once(cluster: Cluster) -> int:
    """Return how many columns a program of a column reduction reads of each row: 128 bytes, a whole line of the cache."""
    return max(8, 128 // min((n.dtype.itemsize for n in full(cluster)), default=4))


def _persistent(cluster: Cluster) -> bool:
    if not cluster.reduce:
        return False
    columns = product(cluster.reduce)
    if column_reduction(cluster):
        return columns <= 64 or kept_upright(cluster)
    return in_registers(cluster)


def kept_upright(cluster: Cluster) -> bool:
    """Whether the columns of a column reduction are read more than once, and a sector of each row of them fits in registers."""
    if scans(cluster) or cluster.segments:
        return False
    along = any(cluster.levels[s.value] and cluster.full[s.value] for s in cluster.stores)
    tile = power_of_two(product(cluster.reduce)) * least_columns(cluster) * max(1, cluster.held)
    return (along or max(cluster.levels.values()) > 1) and tile <= MAX_ROW // 2


def least_columns(cluster: Cluster) -> int:
    """Return how many columns of a column reduction a program reads at least."""
    return at_least(min((n.dtype.itemsize for n in full(cluster)), default=4), cluster, MAX_ROW // 2)


def in_registers(cluster: Cluster) -> bool:
    """Whether a program holds a row, as it is computed with or as it was loaded."""
    return _fits(cluster) or fits_kept(cluster, MAX_ROW)


def row_tile(cluster: Cluster) -> int:
    """Return the elements of a tile that holds a row: its whole groups if it is peeled, each of its segments padded to a power of two."""
    many, each = cluster.segment
    return power_of_two(many) * power_of_two(each) if cluster.segments else power_of_two(tile_columns(cluster))


def _fits(cluster: Cluster) -> bool:
    columns = row_tile(cluster)
    held = max(2 if scans(cluster) else 1, cluster.held)  # a scan keeps its row besides what it makes of it; in a loop it reads it once too
    columns *= crossing(cluster)
    return columns * held <= MAX_ROW and columns * _loaded(cluster) <= 1.5 * MAX_ROW


def _loaded(cluster: Cluster) -> float:
    """Return how many 32-bit values a column takes while everything that differs from row to row is being loaded.

    What is one value for a run of neighbours is loaded where it is used.
    """
    split = len(cluster.parallel)
    strides = [(n, n.layout.strides or ()) for n in full(cluster)]
    rows = {(n.buffer, n.layout): n for n, steps in strides if any(steps[:split]) and (n.index or steps[-1])}
    return sum(n.dtype.itemsize for n in rows.values()) / 4


def fits_kept(cluster: Cluster, values: int) -> bool:
    """Whether a row fits in registers as it was loaded, beside its column sums; what several passes need is not drawn again for each."""
    if cluster.segments or cluster.varies or peel(cluster) or crossing(cluster) > 1 or any(isinstance(n, Scan) for n in cluster.order):
        return False
    if any(isinstance(n, Random) for n in used_again(cluster)):
        return False
    split = len(cluster.parallel)
    written = [s.dtype.itemsize / 4 for s in cluster.stores if not s.reduces and any((s.layout.strides or ())[split:])]
    sums, columns = column_sums(cluster), power_of_two(product(cluster.reduce))
    # beside column sums all that is read along the row has to find registers, too; so has a row that waits while another is written
    each = (sums + _read(cluster) if sums else kept_values(cluster)) + sum(sorted(written)[:-1])
    return columns * each <= (1.25 if sums else 1) * values and columns * _loaded(cluster) <= 1.5 * values


def _read(cluster: Cluster) -> float:
    """Return how many 32-bit values a column takes as it was loaded, what is the same for all rows included."""
    return sum(n.dtype.itemsize for n in {(n.buffer, n.layout): n for n in full(cluster)}.values()) / 4


# -- tiles -----------------------------------------------------------------------------------------------------------------------------
def _tile_pointwise(cluster: Cluster, device: Device) -> list[Schedule]:
    size = product(cluster.axes)
    buffers = len(cluster.reads) + len(cluster.writes)
    full = 2 * device.sms
    block = 1024 if size >= full * 1024 and buffers <= 8 else 512 if size >= full * 512 else 256
    block = min(block, power_of_two(size))
    return [Schedule("pointwise", (("XBLOCK", block),), max(1, block // 256))]


def _tile_row(cluster: Cluster, device: Device) -> list[Schedule]:
    return [Schedule("pointwise_row", (("XBLOCK", n),), n // 256) for n in _parts(cluster.axes[-1])[:1]]


def _parts(columns: int) -> list[int]:
    """Return the tiles, largest first, that a row is cut into without much standing over its end."""
    return [n for n in (1024, 512) if -columns % n * WASTE <= columns]


def _group(found: Peel | None) -> int:
    return found.group if found else 0


def _tile_persistent(cluster: Cluster, device: Device) -> list[Schedule]:
    rows, columns = product(cluster.parallel), row_tile(cluster)
    if column_reduction(cluster):
        columns = columns if cluster.segments else power_of_two(product(cluster.reduce))
        if columns > 64:
            return [_tile_upright(cluster, columns, rows, device)]
        across = _columns_a_program(min(max(8, min(64, 4096 // columns)), power_of_two(rows)), rows, device)
        warps = min(16, max(1, across * columns * min(4, max(1, len(full(cluster)))) // 1024))
        return [Schedule("reduction_persistent", (("XBLOCK", across), ("RBLOCK", columns)), power_of_two(warps))]
    found, group = [], _group(peel(cluster))
    if not _fits(cluster):
        return [Schedule("reduction_persistent", (("XBLOCK", 1), ("RBLOCK", columns)), 16, keep=True)]
    if (least := crossing(cluster)) > 1:
        return _tiles_crossed(columns, least, MAX_ROW // max(1, cluster.held))
    for across in (1 << n for n in range(7)):
        small = across * columns <= WARP_VALUES  # less would leave lanes of the one warp without a value
        if across > 1 and (across * columns > 4096 or across > power_of_two(rows) or (rows // across < 2 * device.sms and not small)):
            break
        for warps in (1, 2, 4, 8, 16):
            each = across * columns // (32 * warps)
            if 4 <= each <= 32 or (warps == 1 and each < 4) or (warps == 16 and each > 32):
                found.append(Schedule("reduction_persistent", (("XBLOCK", across), ("RBLOCK", columns)), warps, peel=group))
    return found


def _tile_upright(cluster: Cluster, columns: int, rows: int, device: Device) -> Schedule:
    least = least_columns(cluster)
    room = max(1, MAX_ROW // 2 // (columns * max(1, cluster.held)))
    most = min(64, power_of_two(rows), max(least, 1 << room.bit_length() - 1))
    across = _columns_a_program(most, rows, device)
    return Schedule("reduction_persistent", (("XBLOCK", across), ("RBLOCK", columns)), max(1, min(16, across * columns // 1024)))


def _tiles_crossed(columns: int, least: int, values: int) -> list[Schedule]:
    """Return tiles of several whole rows, read along the columns and along the rows."""
    found = []
    for across in (least, 2 * least, 4 * least):
        if across > least and across * columns > values // 2:
            break
        warps = [w for w in (1, 2, 4, 8, 16) if 8 <= across * columns // (32 * w) <= 32] or [16 if across * columns > 1024 else 1]
        found += [Schedule("reduction_persistent", (("XBLOCK", across), ("RBLOCK", columns)), w) for w in warps]
    return found


def _columns_a_program(most: int, rows: int, device: Device) -> int:
    """Return how many columns a program of a column reduction takes: fewer, where the device would not be full."""
    while most > 8 and rows // most < device.sms:
        most //= 2  # 8 columns are the 32 bytes that memory hands out at once
    return most


def _tile_mixed(cluster: Cluster, device: Device) -> list[Schedule]:
    columns, rows, group = power_of_two(tile_columns(cluster)), product(cluster.parallel), _group(peel(cluster))
    if fits_mixed(cluster, device.mixed_values):
        most, warps = power_of_two(-(-rows // cluster.programs)), 8 if group else 16  # the ends of a row take registers of their own
        rows_at_once = dict.fromkeys(1 if group else max(crossing(cluster), min(tile // columns, most)) for tile in (512, 1024, 2048))
        return [
            Schedule("reduction_mixed", (("XBLOCK", n), ("RBLOCK", columns)), min(warps, max(1, n * columns // 256)), stages, peel=group)
            for n in rows_at_once
            for stages in (2, 1)
        ]
    if fits_kept(cluster, device.mixed_values):
        return [Schedule("reduction_mixed", (("XBLOCK", 1), ("RBLOCK", columns)), 16, keep=True)]
    # fewer threads have fewer addresses beside the sums; a row that is too long for them is refused later
    walks = [warps for warps, most in WALKED_BYTES.items() if _row_bytes(cluster) <= most] or [min(WALKED_BYTES)]
    return [Schedule("reduction_mixed", (("XBLOCK", 1), ("RBLOCK", WALKED * warps // 16)), warps) for warps in walks]


def fits_mixed(cluster: Cluster, values: int) -> bool:
    """Whether a program of a mixed reduction keeps its row in registers, besides the column sums."""
    return power_of_two(tile_columns(cluster)) * crossing(cluster) * max(1, column_sums(cluster) + cluster.held) <= values


def even_rows(cluster: Cluster) -> bool:
    """Whether every row that is read or written begins at a multiple of 16 bytes."""
    split = len(cluster.parallel)
    strides = [(s, n.dtype.itemsize) for n in full(cluster) for s in (n.layout.strides or ())[:split]]
    strides += [(n, s.dtype.itemsize) for s in cluster.stores for n in (s.layout.strides or ())[:split] if n != 1]
    return all(stride * size % 16 == 0 for stride, size in strides)


def _even_columns(cluster: Cluster) -> bool:
    """Whether a column reduction reads each row from a multiple of 16 bytes on; otherwise each element takes an address of its own."""
    split = len(cluster.parallel)
    return all(s * n.dtype.itemsize % 16 == 0 for n in full(cluster) for s in (n.layout.strides or ())[split:])


def _even_runs(cluster: Cluster) -> bool:
    """Whether every run of neighbours in a row begins at a multiple of 16 bytes: a copy ahead of any other takes an address an element."""
    runs = [n for n in full(cluster) if (n.layout.strides or (0,))[-1]]
    return all(s * n.dtype.itemsize % 16 == 0 for n in runs for s in (n.layout.strides or ())[:-1])


def refused_walk(cluster: Cluster, values: int) -> str:
    """Return why no program of a mixed reduction can walk over these rows, "" if one can: once in registers, or twice in a few tiles."""
    columns, sums = product(cluster.reduce), column_sums(cluster)
    if fits_mixed(cluster, values) or fits_kept(cluster, values):
        return ""
    if crossing(cluster) > 1:
        return f"an operand crosses rows of {columns}: of {crossing(cluster)} of them and their column sums no program keeps a tile"
    if power_of_two(columns) * sums > values:
        return f"{sums} column sums of rows of {columns} do not fit in the registers of a program"
    if _row_bytes(cluster) > max(WALKED_BYTES.values()) or _row_bytes(cluster) + 4 * columns * sums > HELD_BYTES:
        return f"rows of {columns} leave a program that keeps their column sums no registers to read them with"
    if not even_rows(cluster):
        return f"rows of {columns} that begin at odd addresses take too many registers, read once and summed both ways"
    return ""


def _row_bytes(cluster: Cluster) -> int:
    return product(cluster.reduce) * max(n.dtype.itemsize for n in full(cluster))


def _tile_looped(cluster: Cluster, device: Device) -> list[Schedule]:
    rows, columns = product(cluster.parallel), power_of_two(product(cluster.reduce))
    moved = sum(n.dtype.itemsize for n in full(cluster))
    if column_reduction(cluster) or crossing(cluster) > 1:
        across = min(columns_at_once(cluster), power_of_two(rows))
        least = max(8, 32 // max((n.dtype.itemsize for n in full(cluster)), default=4))
        while across > least and rows // across < device.sms:
            across //= 2  # down to the 32 bytes that memory hands out at once
        return [
            Schedule("reduction_looped", (("XBLOCK", across), ("RBLOCK", min(columns, tile // across))), 8 * tile // 4096 or 4, stages)
            for tile in ((2048, 4096, 8192) if _even_columns(cluster) else (2048, 4096))
            for stages in (1, 2, 3)
            if stages == 1 or stages * tile * moved <= STAGED
        ]
    whole = power_of_two(cluster.segment[1]) if cluster.segments else 1  # a tile holds whole segments
    sizes = dict.fromkeys(
        (16 if block < whole else warps, max(block, whole)) for warps, block in ((8, 2048), (8, 4096), (16, 4096), (16, 8192))
    )
    group = _group(peel(cluster))
    ahead = (1, 2, 3) if group or _even_runs(cluster) else (1,)
    return [
        Schedule("reduction_looped", (("XBLOCK", 1), ("RBLOCK", min(block, max(columns, whole)))), warps, stages, peel=group)
        for warps, block in sizes
        for stages in ahead
        if stages == 1 or stages * block * moved <= STAGED
    ]


COLUMN, ROW = "[:, None]", "[None, :]"
PROGRAM = "tl.program_id(0){wide} * XBLOCK"
REDUCTION = {"x": COLUMN, "r": ROW}

# The first row that applies wins; render_foreach.py has its own tiles.
TEMPLATES = (
    Template("reduction_mixed", lambda cluster: cluster.programs > 0, _tile_mixed, {"x": "first", "r": "@ * RBLOCK"}, REDUCTION),
    Template(
        "pointwise_2d",
        _two_fast_axes,
        tiles_2d,
        {"y": "(tl.program_id(0) // {across}){wide} * YBLOCK", "x": "(tl.program_id(0) % {across}){wide} * XBLOCK"},
        {"y": COLUMN, "x": ROW},
    ),
    Template("pointwise_row", _rows_of_one_value, _tile_row, {"x": "first"}, {"x": ""}),
    Template("pointwise", _pointwise, _tile_pointwise, {"x": PROGRAM}, {"x": ""}),
    Template("reduction_persistent", _persistent, _tile_persistent, {"x": PROGRAM, "r": "0"}, REDUCTION),
    Template("reduction_looped", lambda cluster: True, _tile_looped, {"x": PROGRAM, "r": "start"}, REDUCTION),
)
TEMPLATE = {template.name: template for template in TEMPLATES}
