"""A device called npu that is made of CPU memory, for code that names cuda or mixes devices, on a machine without either.

Its tensors wrap CPU tensors and say that they are on npu:0; every operation runs on what they wrap, and one that mixes
them with tensors of the CPU is refused, as a device would. ``install`` changes PyTorch for the whole process: call it in a
process that ends with the test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "npu"
aten = torch.ops.aten
# Operations that a device allows between its own tensors and those of the CPU.
MAY_MIX = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


class FakeModule:
    """``torch.npu``: one device that is always there and does at once what it is told."""

    class Stream:
        """A stream or an event; there is nothing to wait for."""

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __getattr__(self, name: str) -> Callable[..., Any]:
            return lambda *_, **__: FakeModule.Stream()

        def __enter__(self) -> FakeModule.Stream:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    Event = Stream

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: None

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def current_stream(self, *_: object) -> Stream:
        return FakeModule.Stream()

    stream = device = current_stream

    def get_rng_state(self, *_: object) -> Tensor:
        return torch.get_rng_state()

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_autocast_enabled(self) -> bool:
        return False


class FakeTensor(Tensor):
    """A tensor of the device; ``inner`` is the CPU's."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> FakeTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=f"{NAME}:0",
            requires_grad=False,
        )
        made.inner = inner
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"FakeTensor({self.inner})"

    def numpy(self, *_: object, **__: object) -> Any:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy")

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation on what the tensors wrap; what it gives is on the device where it would be."""
    flat, spec = tree.tree_flatten((args, dict(kwargs)))
    ours = [x for x in flat if isinstance(x, FakeTensor)]
    foreign = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, FakeTensor) and x.ndim > 0]
    if ours and foreign and func not in MAY_MIX:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {NAME}:0 and cpu in {func}")
    if func is aten.copy_.default:
        target, source = (x.inner if isinstance(x, FakeTensor) else x for x in args[:2])
        target.copy_(source)
        return args[0]
    device = kwargs.get("device")
    is_ours = bool(ours) if device is None else torch.device(device).type == NAME
    plain_args, plain_kwargs = tree.tree_unflatten([_plain(x) for x in flat], spec)
    same = {id(x.inner): x for x in ours}  # an operation in place gives back the tensor it was given

    def wrapped(x: Any) -> Any:
        if not is_ours or not isinstance(x, Tensor) or isinstance(x, FakeTensor):
            return x
        return same.get(id(x)) if id(x) in same else FakeTensor(x)

    return tree.tree_map(wrapped, func(*plain_args, **plain_kwargs))


def _plain(x: Any) -> Any:
    if isinstance(x, FakeTensor):
        return x.inner
    if isinstance(x, torch.device) and x.type == NAME:
        return torch.device("cpu")
    return "cpu" if isinstance(x, str) and x.startswith(NAME) else x


def install() -> list[torch.library.Library]:
    """Make the device; it stays for as long as what is returned is kept."""
    _setup_privateuseone_for_python_backend(NAME, FakeModule())
    torch.__future__.set_swap_module_params_on_conversion(True)  # a wrapper cannot stand in a CPU parameter's place

    def any_other(func: Any, *args: Any, **kwargs: Any) -> Any:
        has_ours = any(isinstance(x, FakeTensor) for x in tree.tree_leaves((args, kwargs)))
        return run(func, args, kwargs if has_ours or "device" in kwargs else {**kwargs, "device": NAME})

    def empty(size: Sequence[int], *, dtype: Any = None, **_: Any) -> Tensor:
        return FakeTensor(torch.empty(size, dtype=dtype, device="cpu"))

    def empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_: Any) -> Tensor:
        return FakeTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))

    def copy_from(source: Tensor, target: Tensor, *_: object) -> Any:
        return run(aten.copy_.default, (target, source), {})

    rest, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    rest.fallback(any_other, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    return [rest, library]
