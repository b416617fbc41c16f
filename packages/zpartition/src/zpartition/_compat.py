"""Private API of torch, in one file; `tests/test__compat.py` fails by name when a new torch changes it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

__all__ = [
    "IS_META_GETTER",
    "TO_NUMBER",
    "Hooks",
    "TorchDispatchMode",
    "any_requires_grad",
    "draw_one",
    "fused_attention",
    "fused_attention_backward",
    "grouped_mm",
    "has_grouped_mm",
    "has_other_views",
    "is_in_backward",
    "is_unreferenced",
    "outer_saved_tensor_hooks",
    "parameters_of",
    "run_backward",
    "running_node",
    "swap",
    "tables_of",
    "tree_flatten",
    "tree_map_only",
    "truncated_normal_through",
    "uncompiled",
    "version",
]

IS_META_GETTER: Any = vars(torch._C.TensorBase)[
    "is_meta"
].__get__  # the function that a function mode sees for `tensor.is_meta`

TO_NUMBER: Any = (
    torch.ops.aten._local_scalar_dense.default
)  # the operation that a dispatch mode sees for `tensor.item()`

Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # pack, unpack


def _any_requires_grad(*tensors: torch.Tensor) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


any_requires_grad: Callable[..., bool] = getattr(torch._C, "_any_requires_grad", _any_requires_grad)


def is_unreferenced(storage: torch.UntypedStorage) -> bool:
    """Return whether no tensor uses the memory of `storage`; False if this torch cannot tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is not None and bool(count(storage._cdata) == 1)


def has_other_views(tensor: torch.Tensor) -> bool:
    """Return whether another tensor uses memory of `tensor`'s storage; False if this torch cannot tell."""
    storage = tensor.untyped_storage()  # which counts itself
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is not None and bool(count(storage._cdata) > 2)


def swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange device, dtype and memory of two tensors; references to either Python object stay valid.

    torch.utils.swap_tensors does the same, but rejects tensors with weak references; RNNs hold such to their weights.
    """
    swap_impl = getattr(torch._C, "_swap_tensor_impl", None)
    if swap_impl is None:
        torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    else:
        swap_impl(tensor, other)


@contextmanager
def truncated_normal_through(record: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Redirect `torch.nn.init.trunc_normal_` to `record(function, tensor, ...)` inside the block.

    It draws again until all values are in range, so it reads values; other initializations do not.
    """
    original = getattr(torch.nn.init, "_no_grad_trunc_normal_", None)
    if original is None:
        yield
        return
    torch.nn.init._no_grad_trunc_normal_ = functools.partial(record, original)
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original


def draw_one() -> None:
    """Advance torch's generator by one number, hidden from all modes."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        torch.rand((), device="cpu")


def parameters_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of all submodules, a tied one more than once, in a fraction of `module.parameters()`."""
    params = [param for current in _modules_of(module) for param in current._parameters.values()]
    return [param for param in params if param is not None]


def tables_of(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the dicts of all submodules that hold their parameters and children."""
    return [table for current in _modules_of(module) for table in (current._parameters, current._modules)]


def _modules_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    modules, seen = [module], {id(module)}
    for current in modules:
        for child in current._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return modules


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors of one storage, also on the meta device, where addresses are 0."""
    return int(tensor.untyped_storage()._cdata)


def version(tensor: torch.Tensor) -> int:
    """Return the number of in-place writes to `tensor`; 0 if this torch cannot tell."""
    return int(getattr(tensor, "_version", 0))


def is_in_backward() -> bool:
    """Return whether autograd runs a backward in this thread; False if this torch cannot tell."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def running_node() -> int | None:
    """Return the number of the running autograd node of this thread; None if there is none or torch cannot tell."""
    current = getattr(torch._C, "_current_autograd_node", None)
    node = None if current is None else current()
    return None if node is None else int(node._sequence_nr())


def run_backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Run torch.autograd.backward with function modes active inside; torch itself disables them.

    With a torch that lacks this entry point, it is torch.autograd.backward, and modes are off inside.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None:
        torch.autograd.backward(outputs, gradients)
        return
    options = {"allow_unreachable": True, "accumulate_grad": True}
    engine.run_backward(tuple(outputs), tuple(gradients), False, False, (), **options)


def outer_saved_tensor_hooks() -> Hooks | None:
    """Return the saved-tensor hooks of this thread; None if there are none, or this torch cannot tell.

    torch applies only the innermost hooks, so added hooks must pass other tensors on to the outer ones (activation
    checkpointing without re-entrance is made of such hooks).
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:
        return None
    found: Hooks | None = top(False)
    return found


def has_grouped_mm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether one kernel multiplies runs of rows of `x`, (rows, in), with `weight`, (runs, out, in).

    It needs bfloat16, rows of multiples of 16 bytes, and a GPU for which this torch has the kernel.  On others torch
    raises (2.8), or multiplies run by run and waits for the device to learn their lengths (since 2.9).
    """
    if not x.is_cuda or x.dtype != torch.bfloat16 or weight.dtype != x.dtype or not hasattr(torch, "_grouped_mm"):
        return False
    fits = all(size * x.element_size() % 16 == 0 for size in (x.shape[-1], weight.shape[-2])) and x.shape[0] > 0
    return fits and torch.cuda.get_device_capability(x.device) in grouped_mm_capabilities(torch.__version__)


def grouped_mm_capabilities(torch_version: str) -> tuple[tuple[int, int], ...]:
    """Return the compute capabilities for which that torch has a kernel of grouped products."""
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    return ((9, 0), (10, 0)) if (major, minor) >= (2, 9) else ((9, 0),)


NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl  # as `__torch_function__`: operations go to dispatch


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply the rows up to each of `ends`, (runs,) int32, with its matrix of `weight`, (runs, in, out)."""
    return torch._grouped_mm(x, weight, offs=ends)


def fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return attention and the log-sum-exp of each query's scores; None if no kernel fits.

    q: (batch, heads, queries, width); k, v: (batch, heads or a divisor of them, keys, width).  If causal there are
    as many keys as queries.  torch's public functions do not return the log-sum-exp.
    """
    kernel = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    if kernel is None or not _is_for_the_cpu_kernel(q, k, v):
        return None
    out, lse = kernel(q, k, v, 0.0, is_causal, scale=scale)
    return out, lse


def fused_attention_backward(
    grad: torch.Tensor, attended: Sequence[torch.Tensor], is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return the gradients of q, k, v through these keys; None if no kernel fits.

    attended: q, k, v, the output and lse of these queries, which may be over more keys.
    """
    q, k, v, out, lse = attended
    kernel = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
    if kernel is None or not _is_for_the_cpu_kernel(q, k, v):
        return None
    dq, dk, dv = kernel(grad, q, k, v, out, lse, 0.0, is_causal, scale=scale)
    return dq, dk, dv


def _is_for_the_cpu_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    is_dense = all(tensor.is_cpu and tensor.stride(-1) == 1 and tensor.numel() for tensor in (q, k, v))
    return is_dense and q.shape[-1] == k.shape[-1] == v.shape[-1]


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.compiler.disable(function)`, made when torch's compiler is in use.

    To make it imports the compiler: 0.8 s and 70 MB in each process, most of which compile nothing.
    """
    made: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph ends here
            apart = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return apart(*args, **kwargs)
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not made:
            made.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return made[0](*args, **kwargs)

    return call
