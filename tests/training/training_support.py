"""What the training tests share: the recipe table written out again, a reference by hand, op counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo.formats import E4M3FN, E5M2, MXFP8, Format

ALL_RECIPES = tuple(octavo.RECIPES)
QUANTIZED_RECIPES = tuple(name for name in octavo.RECIPES if name != "bf16")

_ONE, _WIDE = Format(E4M3FN, "tensorwise"), Format(E5M2, "tensorwise")
_ROW, _ONE_POWER = Format(E4M3FN, "rowwise", "power_of_two"), Format(E4M3FN, "tensorwise", "power_of_two")
_1X128, _128X128 = Format(E4M3FN, "1x128"), Format(E4M3FN, "128x128")
_BLOCK_POWER = Format(E4M3FN, "128x128", "power_of_two")

# The recipe table of docs/numerics.md, deliberately not read from octavo.RECIPES: formats of the operands
# (a, b) and fast accumulation of output, grad_input, grad_weight.
CONTRACT: dict[str, tuple[tuple[Format, Format, bool] | None, ...]] = {
    "bf16": (None, None, None),
    "tensorwise": ((_ONE, _ONE, True), (_WIDE, _ONE, False), (_WIDE, _ONE, False)),
    "rowwise": ((_ROW, _ROW, True), (_ROW, _ROW, False), (_ROW, _ROW, False)),
    "rowwise_with_gw_hp": ((_ROW, _ROW, True), (_ROW, _ONE_POWER, False), None),
    "rowwise_block_weight": ((_ROW, _BLOCK_POWER, True), (_ROW, _BLOCK_POWER, False), (_ROW, _ROW, False)),
    "blockwise": ((_1X128, _128X128, False), (_1X128, _128X128, False), (_1X128, _1X128, False)),
    "mxfp8": ((MXFP8, MXFP8, False),) * 3,
}


class OpCount(TorchDispatchMode):
    """Counts the ops that reach the dispatcher, by qualified name without overload."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func).rsplit(".", 1)[0]] += 1
        return func(*args, **(kwargs or {}))

    def octavo(self) -> dict[str, int]:
        """Counts of this package's own ops."""
        return {name.split(".")[1]: count for name, count in self.ops.items() if name.startswith("octavo.")}


def product_by_hand(
    a: torch.Tensor, b: torch.Tensor, formats: tuple[Format, Format, bool] | None, bias: Any = None
) -> torch.Tensor:
    """``a[M, K] @ b[N, K].T + bias`` from the package's own quantize and scaled_mm, one call after another."""
    if formats is None:
        return torch.nn.functional.linear(a, b, bias)
    fmt_a, fmt_b, fast = formats
    left, right = octavo.quantize(a.contiguous(), fmt_a), octavo.quantize(b.contiguous(), fmt_b)
    return octavo.scaled_mm(left, right, bias=bias, out_dtype=a.dtype, fast_accum=fast)


def linear_by_hand(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    grad: torch.Tensor,
    contract: tuple[tuple[Format, Format, bool] | None, ...],
) -> tuple[torch.Tensor, ...]:
    """(output, grad_input, grad_weight, grad_bias) of a linear layer on x [..., K]."""
    rows, g = x.reshape(-1, weight.shape[1]), grad.reshape(-1, weight.shape[0])
    output = product_by_hand(rows, weight, contract[0], bias).view(*x.shape[:-1], weight.shape[0])
    grad_input = product_by_hand(g, weight.T, contract[1]).view(x.shape)
    grad_weight = product_by_hand(g.T, rows.T, contract[2])
    return output, grad_input, grad_weight, g.sum(0)


def run_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, grad: torch.Tensor, recipe: Any
) -> tuple[torch.Tensor | None, ...]:
    """(output, grad_input, grad_weight, grad_bias) through autograd."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias)]
    out = octavo.linear(*leaves, recipe=recipe)
    out.backward(grad)
    return out.detach(), *(None if t is None else t.grad for t in leaves)


def penalty_backward(out: torch.Tensor, x: torch.Tensor) -> None:
    """Backward of a gradient penalty: a derivative of the derivative of ``out`` by ``x``."""
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    grad.square().sum().backward()


class Net(nn.Module):
    """A residual block of three linear layers, [..., 64] to [..., 64]."""

    def __init__(self, width: int = 64, hidden: int = 96) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.down(nn.functional.silu(self.up(x))))


def make_net(recipe: Any = "rowwise", dtype: torch.dtype = torch.float32) -> Net:
    """A converted :class:`Net` with fixed weights."""
    torch.manual_seed(0)
    net = Net().to(dtype)
    octavo.convert(net, recipe)
    return net


def run_net(
    net: nn.Module, x: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Output, gradient of the input and of every parameter of one forward and backward pass."""
    net.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = net(x) if call is None else call(x)
    (y * torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype)).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


def assert_all_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Bit equality of two lists of tensors."""
    assert len(actual) == len(expected)
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == b.dtype, index
        assert torch.equal(a, b), (index, (a.float() - b.float()).abs().max())
