"""Functions of torch that a graph cannot repeat.

In: a function of torch. Out: what the user calls it, and why it is refused.

    >>> REFUSED[torch.Tensor.item]
    ('.item()', 'reads the values of a tensor, which are not known while capturing')
"""

from __future__ import annotations

from typing import Any

import torch

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
    T.backward: ("Tensor.backward", "runs autograd inside the graph; jit the forward function and call backward outside"),
    torch.autograd.grad: ("torch.autograd.grad", "runs autograd inside the graph; jit the forward function and call it outside"),
    torch.autograd.backward: ("torch.autograd.backward", "runs autograd inside the graph; call it outside"),
    torch.from_numpy: ("torch.from_numpy", "would freeze the array's values; pass a tensor"),
}
UNKEYED = {".storage_offset()": T.storage_offset, "._is_view()": T._is_view, ".is_conj()": T.is_conj, ".is_neg()": T.is_neg,
           ".is_inference()": T.is_inference, ".is_leaf": T.is_leaf.__get__, "._version": T._version.__get__}  # fmt: skip
REFUSED |= {read: (name, "may differ between two tensors that run the same program") for name, read in UNKEYED.items()}
DATA = T.data.__get__
