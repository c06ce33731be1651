"""Private names of torch, each looked up once, here; those of the hot path are in runtime/torch_private.py.

In: a name of `NAMES`. Out: what this torch has under it, found at the first use and kept. Where torch has it under none
of its paths: `Unsupported`, so that the call runs eagerly and says why.

    >>> from fusejit import torch_private as private
    >>> private.maybe_current_level() is None
    True

A name moves between versions, or is gone: give its row a second path.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .errors import Unsupported


@dataclass(frozen=True, slots=True)
class Private:
    """A private name: its paths in the order in which they are tried, and what needs it."""

    paths: tuple[str, ...]
    needed_by: str


def any_autocast() -> bool:
    """Whether autocast is on for any kind of device: what torch's C interface says in one call."""
    return any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


def raw_stream(device: int) -> int:
    """The current stream of a device as the driver's number."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def _rows(needed_by: str, **paths: str | tuple[str, ...]) -> dict[str, Private]:
    return {name: Private((path,) if isinstance(path, str) else path, needed_by) for name, path in paths.items()}


NAMES: dict[str, Private] = {
    # torch's C interface
    **_rows(
        "reading the state of a call",
        torch_c="torch._C",
        DisableTorchFunction="torch._C.DisableTorchFunction",
        DispatchKey="torch._C.DispatchKey",
        DispatchKeySet="torch._C.DispatchKeySet",
        TensorBase="torch._C.TensorBase",
        DisableAutocast="torch._C._DisableAutocast",
        DisableFuncTorch="torch._C._DisableFuncTorch",
        ExcludeDispatchKeyGuard="torch._C._ExcludeDispatchKeyGuard",
        top_saved_tensors_default_hooks="torch._C._autograd._top_saved_tensors_default_hooks",
        cuda_getCurrentRawStream=("torch._C._cuda_getCurrentRawStream", "fusejit.torch_private.raw_stream"),
        cuda_getDevice=("torch._C._cuda_getDevice", "torch.cuda.current_device"),
        disabled_torch_function_impl="torch._C._disabled_torch_function_impl",
        dispatch_has_kernel_for_dispatch_key="torch._C._dispatch_has_kernel_for_dispatch_key",
        dispatch_tls_is_dispatch_key_excluded="torch._C._dispatch_tls_is_dispatch_key_excluded",
        dispatch_tls_set_dispatch_key_excluded="torch._C._dispatch_tls_set_dispatch_key_excluded",
        functorch_c="torch._C._functorch",
        get_dynamic_layer_stack_depth="torch._C._functorch.get_dynamic_layer_stack_depth",
        get_unwrapped="torch._C._functorch.get_unwrapped",
        is_batchedtensor="torch._C._functorch.is_batchedtensor",
        is_functorch_wrapped_tensor="torch._C._functorch.is_functorch_wrapped_tensor",
        maybe_current_level="torch._C._functorch.maybe_current_level",
        pop_dynamic_layer_stack_and_undo_to_depth="torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth",
        get_deterministic_algorithms=(
            "torch._C._get_deterministic_algorithms",
            "torch.are_deterministic_algorithms_enabled",
        ),
        get_function_stack_at="torch._C._get_function_stack_at",
        get_tracing_state="torch._C._get_tracing_state",
        is_any_autocast_enabled=("torch._C._is_any_autocast_enabled", "fusejit.torch_private.any_autocast"),
        jit_get_all_schemas="torch._C._jit_get_all_schemas",
        len_torch_dispatch_stack="torch._C._len_torch_dispatch_stack",
        len_torch_function_stack="torch._C._len_torch_function_stack",
        nn="torch._C._nn",
        set_default_dtype=("torch._C._set_default_dtype", "torch.set_default_dtype"),
        set_grad_enabled="torch._C._set_grad_enabled",
        storage_Use_Count="torch._C._storage_Use_Count",
        is_grad_enabled=("torch._C.is_grad_enabled", "torch.is_grad_enabled"),
    ),
    # operators and their tables
    **_rows(
        "the ops of a graph",
        core_aten_decompositions="torch._decomp.core_aten_decompositions",
        get_decompositions="torch._decomp.get_decompositions",
        singleton="torch._library.simple_registry.singleton",
        HigherOrderOperator="torch._ops.HigherOrderOperator",
        OpOverload="torch._ops.OpOverload",
        OpOverloadPacket="torch._ops.OpOverloadPacket",
        pop_mode_from_pre_dispatch="torch._ops._pop_mode_from_pre_dispatch",
        set_mode_pre_dispatch="torch._ops._set_mode_pre_dispatch",
    ),
    # fake tensors and tracing
    **_rows(
        "capture",
        GuardSource="torch._guards.GuardSource",
        Source="torch._guards.Source",
        TracingContext="torch._guards.TracingContext",
        tracing="torch._guards.tracing",
        registered_hop_fake_fns="torch._higher_order_ops.utils.registered_hop_fake_fns",
        FakeTensor="torch._subclasses.fake_tensor.FakeTensor",
        FakeTensorMode="torch._subclasses.fake_tensor.FakeTensorMode",
        unset_fake_temporarily="torch._subclasses.fake_tensor.unset_fake_temporarily",
        LazyGraphModule="torch.fx._lazy_graph_module._LazyGraphModule",
        use_lazy_graph_module="torch.fx._lazy_graph_module._use_lazy_graph_module",
        symbolic_trace="torch.fx._symbolic_trace",
        ProxyTensor="torch.fx.experimental.proxy_tensor._ProxyTensor",
        snapshot_fake="torch.fx.experimental.proxy_tensor.snapshot_fake",
        track_tensor_tree="torch.fx.experimental.proxy_tensor.track_tensor_tree",
        side_effectful_functions="torch.fx.node._side_effectful_functions",
    ),
    # AOTAutograd
    **_rows(
        "gradients",
        aot_stage2_compile="torch._functorch._aot_autograd.graph_compile.aot_stage2_compile",
        MutationType="torch._functorch._aot_autograd.schemas.MutationType",
        OutputType="torch._functorch._aot_autograd.schemas.OutputType",
        aot_export_joint_with_descriptors="torch._functorch.aot_autograd.aot_export_joint_with_descriptors",
        min_cut_rematerialization_partition=(
            "torch._functorch.partitioners.min_cut_rematerialization_partition",
            "functorch.compile.min_cut_rematerialization_partition",
        ),
        temporarily_clear_interpreter_stack="torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    ),
    # Dynamo
    **_rows(
        "capture_mode 'bytecode'",
        dynamo_config="torch._dynamo.config",
        eval_frame="torch._dynamo.eval_frame",
        exc="torch._dynamo.exc",
        optimize="torch._dynamo.optimize",
        ConvertFrameReturn="torch._dynamo.types.ConvertFrameReturn",
        FrameAction="torch._dynamo.types.FrameAction",
        FrameExecStrategy="torch._dynamo.types.FrameExecStrategy",
        counters="torch._dynamo.utils.counters",
    ),
    # the rest
    **_rows(
        "a convenience",
        make_wrapper_subclass="torch.Tensor._make_wrapper_subclass",
        compute_elementwise_output_strides="torch._prims_common.compute_elementwise_output_strides",
        infer_size="torch._prims_common.infer_size",
        is_non_overlapping_and_dense_or_false="torch._prims_common.is_non_overlapping_and_dense_or_false",
        suggest_memory_format="torch._prims_common.suggest_memory_format",
        enter_autocast="torch.amp.autocast_mode._enter_autocast",
        exit_autocast="torch.amp.autocast_mode._exit_autocast",
        sleep="torch.cuda._sleep",
        get_current_function_mode="torch.overrides._get_current_function_mode",
        DeviceContext="torch.utils._device.DeviceContext",
        TorchDispatchMode="torch.utils._python_dispatch.TorchDispatchMode",
        pytree="torch.utils._pytree",
        keystr="torch.utils._pytree.keystr",
        tree_flatten="torch.utils._pytree.tree_flatten",
        tree_flatten_with_path="torch.utils._pytree.tree_flatten_with_path",
        tree_leaves="torch.utils._pytree.tree_leaves",
        tree_map="torch.utils._pytree.tree_map",
        tree_map_only="torch.utils._pytree.tree_map_only",
        tree_unflatten="torch.utils._pytree.tree_unflatten",
    ),
}


def __getattr__(name: str) -> Any:
    row = NAMES.get(name)
    if row is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path, value = look_up(row)
    if path is None:
        gone = f"torch {torch.__version__} without {row.paths[0]}"
        raise Unsupported(gone, f"{row.needed_by} needs it; install a torch of the range that fusejit names", "", False)
    globals()[name] = value
    return value


def look_up(row: Private) -> tuple[str | None, Any]:
    """Return the first path of a row that this torch has, and what is there; (None, None) if it has none."""
    for path in row.paths:
        try:
            return path, resolve(path)
        except (ImportError, AttributeError):
            continue
    return None, None


def resolve(path: str) -> Any:
    """Return what a dotted path names, its modules imported as needed."""
    parts = path.split(".")
    value: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        try:
            value = getattr(value, part)
        except AttributeError:
            value = importlib.import_module(".".join(parts[:number]))
    return value


def found() -> Iterator[tuple[str, str | None]]:
    """Yield each name with the path under which this torch has it, None for a name that is gone."""
    for name, row in NAMES.items():
        yield name, look_up(row)[0]
