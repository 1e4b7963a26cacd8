"""``F.scaled_dot_product_attention`` forward and backward: every backend of PyTorch's, our kernel, and what is served.

FLOPs are those of the products that a causal mask leaves: two in the forward, five in the backward. ``octavo`` is what
a user gets with the operator on, ``aten`` PyTorch's default backend, ``kernel`` Octavo's own kernel, served or not.
Backward operators are called with what their own forward saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from octavo import operators
from octavo.bench.cases import Case
from octavo.bench.timing import Contender, Inputs
from octavo.operators import attention

HEAD_DIMS: tuple[tuple[int, int], ...] = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS = 8192
"""Of a batch: a length below it runs as several sequences."""
WIDTH = 4096
"""About heads times head dimension."""
TOLERANCE = 0.01
"""Relative error of bfloat16 outputs and gradients against PyTorch's own kernel; two correct ones differ by 0.003."""


@dataclass(frozen=True)
class Backend:
    """One of PyTorch's attention operators: its forward and its backward with what the forward returned."""

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[torch.Tensor, ...]]


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[Any, ...]:
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)


def _cudnn_backward(
    g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: tuple[Any, ...], causal: bool
) -> tuple[torch.Tensor, ...]:
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = saved
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        g, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal
    )


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[Any, ...]:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)


def _flash_backward(
    g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: tuple[Any, ...], causal: bool
) -> tuple[torch.Tensor, ...]:
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = saved
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        g, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset
    )


def _efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[Any, ...]:
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)


def _efficient_backward(
    g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, saved: tuple[Any, ...], causal: bool
) -> tuple[torch.Tensor, ...]:
    out, lse, seed, offset = saved
    return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        g, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False], causal
    )[:3]


BACKENDS = {
    "cudnn": Backend(_cudnn, _cudnn_backward),
    "flash": Backend(_flash, _flash_backward),
    "efficient": Backend(_efficient, _efficient_backward),
}


def default_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> str:
    """The backend that ``F.scaled_dot_product_attention`` takes for these tensors, "flash" where it takes none."""
    from torch.nn.attention import SDPBackend

    choice = torch._fused_sdp_choice(  # pyright: ignore[reportPrivateImportUsage]
        q, k, v, None, 0.0, causal
    )
    names = {"CUDNN_ATTENTION": "cudnn", "FLASH_ATTENTION": "flash", "EFFICIENT_ATTENTION": "efficient"}
    return next(
        (name for member, name in names.items() if choice == getattr(SDPBackend, member).value), "flash"
    )


def shapes() -> list[tuple[int, int, int, bool]]:
    """(head dimension, that of the value, length, causal)."""
    return [(d, dv, n, causal) for d, dv in HEAD_DIMS for n in LENGTHS for causal in (True, False)]


def flops(batch: int, heads: int, length: int, d: int, dv: int, causal: bool, backward: bool) -> int:
    """Of the products alone, for the pairs of query and key that are seen."""
    pairs = batch * heads * (length * (length + 1) // 2 if causal else length * length)
    return 2 * pairs * (3 * d + 2 * dv if backward else d + dv)


def check(result: Any, expected: Any) -> None:
    """Against PyTorch's own kernel, to TOLERANCE."""
    pairs = zip(result, expected) if isinstance(result, tuple) else ((result, expected),)
    for i, (got, want) in enumerate(pairs):
        error = ((got.double() - want.double()).norm() / want.double().norm()).item()
        assert error <= TOLERANCE, f"output {i} differs from PyTorch's by {error:.2e}"


def _tensors(d: int, dv: int, length: int) -> list[torch.Tensor]:
    heads, batch = max(1, WIDTH // d), max(1, TOKENS // length)
    made = (
        torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16) for dim in (d, d, dv, dv)
    )
    return [x.transpose(1, 2) for x in made]


@dataclass
class _Saved:
    """What each forward saved for its backward on one set of inputs, computed when first asked for."""

    tensors: tuple[torch.Tensor, ...]
    causal: bool
    found: dict[str, tuple[Any, ...]]

    def of(self, name: str, forward: Callable[..., tuple[Any, ...]]) -> tuple[Any, ...]:
        if name not in self.found:
            self.found[name] = forward(*self.tensors, self.causal)
        return self.found[name]


def _contenders(default: str, causal: bool, backward: bool, force: bool) -> dict[str, Contender]:
    def forward_by(forward: Callable[..., tuple[Any, ...]]) -> Callable[..., torch.Tensor]:
        return lambda q, k, v, *_: forward(q, k, v, causal)[0]

    def backward_by(name: str, backend: Backend) -> Callable[..., tuple[torch.Tensor, ...]]:
        return lambda q, k, v, g, saved: backend.backward(g, q, k, v, saved.of(name, backend.forward), causal)

    def call(name: str, backend: Backend) -> Callable[..., Any]:
        return backward_by(name, backend) if backward else forward_by(backend.forward)

    on = functools.partial(operators.enabled, "attention", force=force)
    ours = Backend(
        attention.attention,
        lambda g, q, k, v, saved, causal: attention.attention_backward(
            g, q, k, v, saved[0], saved[1], causal
        ),
    )
    out = {
        "octavo": Contender(call("octavo", BACKENDS[default]), on),
        "aten": Contender(call("aten", BACKENDS[default])),
    }
    out["kernel"] = Contender(call("kernel", ours))
    return out | {name: Contender(call(name, b)) for name, b in BACKENDS.items() if name != default}


def _case(d: int, dv: int, length: int, causal: bool, backward: bool, force: bool) -> Case:
    heads, batch = max(1, WIDTH // d), max(1, TOKENS // length)

    def make() -> Inputs:
        tensors = _tensors(d, dv, length)
        return *tensors, _Saved(tuple(tensors[:3]), causal, {})

    default = "flash"
    if torch.cuda.is_available():
        q, k, v, _ = _tensors(d, dv, length)
        default = default_backend(q, k, v, causal)
    contenders = _contenders(default, causal, backward, force)

    def check_both(inputs: Inputs, result: Any) -> None:
        """Both the kernel itself and what is served must be right, or nothing is timed."""
        expected = contenders["aten"](*inputs)
        for found in (result, contenders["kernel"](*inputs)):
            check(found, expected)

    def taken(inputs: Inputs) -> bool:
        kind = "attention_backward" if backward else "attention"
        return force or attention.measured(kind, inputs[0], inputs[1], inputs[2], causal) is None

    elements = batch * heads * length * 2 * (d + dv)
    return Case(
        group=f"{'backward' if backward else 'forward'}_{d}" + ("" if d == dv else f"_{dv}"),
        case=f"bf16 B={batch} H={heads} L={length}" + (" causal" if causal else ""),
        bytes=2 * elements * (2 if backward else 1),
        flops=flops(batch, heads, length, d, dv, causal, backward),
        make=make,
        contenders=contenders,
        check=check_both,
        taken=taken,
        note=f"aten is {default}",
    )


def cases(force: bool = False) -> list[Case]:
    """Forward and backward of every shape."""
    return [_case(*shape, backward, force) for backward in (False, True) for shape in shapes()]
