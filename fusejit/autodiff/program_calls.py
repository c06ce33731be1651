"""Program calls: the ops of a functional graph that stand for calls of Programs of their own.

In: an op's arguments and the strides of its tensors. Out: the name of the Program and the Program, for the lowering.

    >>> name, program = PROGRAMS[node.target](node.args, strides)
"""

from __future__ import annotations

from typing import Any

from ..codegen.passes.lower_externs import ProgramOf
from .chunked.chunk_op import ROWS, program
from .region_ops import BACKWARD, FORWARD, backward_program, forward_program

PROGRAMS: dict[Any, ProgramOf] = {FORWARD: forward_program, BACKWARD: backward_program, ROWS: program}
