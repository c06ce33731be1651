"""The table of templates, in the order in which they are asked.

In: the tiles of each template, next door. Out: `TEMPLATES`; the first row that applies to a cluster gets it.

    >>> next(t for t in TEMPLATES if t.applies(cluster)).name
    'reduction_persistent'
"""

from __future__ import annotations

from .base import COLUMN, PROGRAM, REDUCTION, ROW, Template
from .pointwise import pointwise, tile_pointwise
from .pointwise_2d import tiles_2d, two_fast_axes
from .pointwise_row import rows_of_one_value, tile_row
from .reduction_looped import tile_looped
from .reduction_mixed import tile_mixed
from .reduction_persistent import persistent, tile_persistent

# The first row that applies wins; codegen/emit/foreach.py has its own tiles.
TEMPLATES = (
    Template(
        "reduction_mixed",
        lambda cluster: cluster.programs > 0,
        tile_mixed,
        {"x": "first", "r": "@ * RBLOCK"},
        REDUCTION,
    ),
    Template(
        "pointwise_2d",
        two_fast_axes,
        tiles_2d,
        {"y": "(tl.program_id(0) // {across}){wide} * YBLOCK", "x": "(tl.program_id(0) % {across}){wide} * XBLOCK"},
        {"y": COLUMN, "x": ROW},
    ),
    Template("pointwise_row", rows_of_one_value, tile_row, {"x": "first"}, {"x": ""}),
    Template("pointwise", pointwise, tile_pointwise, {"x": PROGRAM}, {"x": ""}),
    Template("reduction_persistent", persistent, tile_persistent, {"x": PROGRAM, "r": "0"}, REDUCTION),
    Template("reduction_looped", lambda cluster: True, tile_looped, {"x": PROGRAM, "r": "start"}, REDUCTION),
)
TEMPLATE = {template.name: template for template in TEMPLATES}
