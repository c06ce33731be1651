"""Functions of torch that a graph cannot repeat, and what torch itself refuses while capturing.

In: a function of torch, or an error. Out: what the user calls the function, and why it is refused; the error in words
of the user's code.

    >>> REFUSED[torch.Tensor.item]
    ('.item()', 'reads the values of a tensor, which are not known while capturing')
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CaptureError, Unsupported
from .source_lines import error_line, raised_by_user
from .state.environment import MARK

WAY_OUT = "keep it outside the jitted function, or compute it with tensor ops"
T: Any = torch.Tensor
VALUE = "reads the values of a tensor, which are not known while capturing"
GRADIENT = "changes how gradients flow by a Python callback, which a graph cannot keep"
REFUSED: dict[Any, tuple[str, str]] = {
    T.item: (".item()", VALUE),
    T.tolist: (".tolist()", VALUE),
    T.numpy: (".numpy()", VALUE),
    T.__array__: ("a conversion to numpy", VALUE),
    T.data_ptr: (".data_ptr()", "depends on the address of a tensor"),
    T.__repr__: ("printing a tensor", VALUE),
    T.__format__: ("formatting a tensor", VALUE),
    T.__deepcopy__: ("copy.deepcopy of a tensor", "needs the tensor's storage; use .clone()"),
    T.__reduce_ex__: ("pickling a tensor", VALUE),
    T.register_hook: ("Tensor.register_hook", GRADIENT),
    T.register_post_accumulate_grad_hook: ("Tensor.register_post_accumulate_grad_hook", GRADIENT),
    T.retain_grad: ("Tensor.retain_grad", "asks for the gradient of a value that exists only inside the graph"),
    T.requires_grad_: ("Tensor.requires_grad_", "changes a tensor's autograd state inside the graph"),
    T.requires_grad.__set__: ("setting .requires_grad", "changes a tensor's autograd state inside the graph"),
    T.grad.__get__: ("reading .grad", "reads a gradient that is not an input of the graph; pass it as an argument"),
    T.grad.__set__: ("setting .grad", "changes a gradient from inside the graph"),
    T.grad_fn.__get__: ("reading .grad_fn", "depends on autograd's own graph"),
    T.data.__set__: ("setting .data", "replaces a tensor's memory inside the graph"),
    T.backward: (
        "Tensor.backward",
        "runs autograd inside the graph; jit the forward function and call backward outside",
    ),
    torch.autograd.grad: (
        "torch.autograd.grad",
        "runs autograd inside the graph; jit the forward function and call it outside",
    ),
    torch.autograd.backward: ("torch.autograd.backward", "runs autograd inside the graph; call it outside"),
    torch.from_numpy: ("torch.from_numpy", "would freeze the array's values; pass a tensor"),
}
UNKEYED = {
    ".storage_offset()": T.storage_offset,
    "._is_view()": T._is_view,
    ".is_conj()": T.is_conj,
    ".is_neg()": T.is_neg,
    ".is_inference()": T.is_inference,
    ".is_leaf": T.is_leaf.__get__,
    "._version": T._version.__get__,
}
REFUSED |= {read: (name, "may differ between two tensors that run the same program") for name, read in UNKEYED.items()}
DATA = T.data.__get__
DATA_DEPENDENT = frozenset(
    {"DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode"}
)
DATA_DEPENDENT_WAY_OUT = (
    "use torch.where (or masks) instead of `if`, `.item()`, boolean indexing or nonzero, or move it outside"
)


def explain_error(error: BaseException) -> BaseException:
    """Turn torch's own refusals into `Unsupported`; leave the user's exceptions as they are."""
    if (
        isinstance(error, AttributeError) and type(error.obj).__name__ == "FakeTensor"
    ):  # of the user's tensor, or of none
        return Unsupported(f"the attribute {error.name} of a tensor", MARK, error_line(error), in_python=False)
    if isinstance(error, (Unsupported, CaptureError)) or not isinstance(error, Exception) or raised_by_user(error):
        return error
    name = type(error).__name__
    if name == "UncapturedHigherOrderOpError":
        way_out = 'call fusejit.cond or fusejit.while_loop, or leave capture_mode at "ast"'
        return Unsupported(
            "torch.cond or torch.while_loop in a plain trace",
            f"torch reads it by its bytecode; {way_out}",
            error_line(error),
        )
    if name in DATA_DEPENDENT or "data-dependent" in str(error).lower():
        return Unsupported(
            "control flow or a shape that depends on the values of a tensor", DATA_DEPENDENT_WAY_OUT, error_line(error)
        )
    return Unsupported(f"torch ({name})", str(error).strip().split("\n")[0], error_line(error))
