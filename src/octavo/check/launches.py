"""Record what a room's launch code would launch on a target, from small CPU tensors and without a GPU.

Inside `recording`, `octavo.hardware.architecture` answers the target for every device, and launching a Triton
kernel notes the launch instead of running it. So the cases are the launches themselves: their tiles, constants and
specializations cannot differ from what a GPU would get. Outputs are left as they were allocated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from octavo import hardware
from octavo.compile_cases import CompileCase

_TYPES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.bool: "i1", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2: "fp8e5", torch.float8_e5m2fnuz: "fp8e5b16",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One launch as Triton would specialize it; the fields are those of `CompileCase`."""

    function: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible: tuple[str, ...]
    options: Mapping[str, Any]

    def case(self, configuration: str, room: str, kind: str) -> CompileCase:
        """The launch as a case of `room`, named after its function."""
        options = dict(self.options)
        return CompileCase(
            kernel=self.function.__name__, configuration=configuration, room=room, kind=kind,
            function=self.function, signature=self.signature, constexprs=self.constexprs, divisible=self.divisible,
            num_warps=options.pop("num_warps", 4), num_stages=options.pop("num_stages", None),
            fp_fusion=options.pop("enable_fp_fusion", True), options=options,
        )  # fmt: skip

    @property
    def identity(self) -> str:
        """Equal for launches that compile to the same code."""
        return repr(
            (
                self.function.__name__,
                dict(self.signature),
                dict(self.constexprs),
                self.divisible,
                self.options,
            )
        )


@contextlib.contextmanager
def recording(target: str) -> Iterator[list[Launch]]:
    """Collect the launches made inside the block, on whatever device, as those of `target`."""
    from triton.runtime.jit import JITFunction

    found: list[Launch] = []

    def note(function: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        found.append(specialize(function, arguments, keywords))

    with (
        mock.patch.object(JITFunction, "run", note),
        mock.patch.object(hardware, "architecture", return_value=target),
    ):
        yield found


def specialize(function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Launch:
    """How Triton specializes a call: None and integers equal to 1 are constants, multiples of 16 are noted.

    Raises:
        TypeError: for an argument of a type that no kernel here takes.
    """
    names = [p.name for p in function.params]
    values = {
        **dict(zip(names, arguments, strict=False)),
        **{k: v for k, v in keywords.items() if k in names},
    }
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible = []
    for parameter in function.params:
        name = parameter.name
        value = values.get(name, parameter.default if parameter.has_default else None)
        one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (one and not isinstance(value, bool)):
            constants[name] = value
            continue
        signature[name] = _type(name, value)
        aligned = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        if aligned and _multiple_of_16(value):
            divisible.append(name)
    options = {k: v for k, v in keywords.items() if k not in names}
    return Launch(function, signature, constants, tuple(divisible), options)


def _type(name: str, value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    if type(value).__name__ == "TensorDescriptor":
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
    raise TypeError(
        f"parameter {name!r} was given a {type(value).__name__}: need a tensor, int, float or None"
    )


def _multiple_of_16(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and not isinstance(value, bool) and value % 16 == 0
