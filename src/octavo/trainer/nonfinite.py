"""Where a NaN or inf came up first in a training step: layer, product and tensor.

Operands of quantized products are watched by :func:`octavo.monitor`, also where one kernel spans several
layers; all other layers, parameters' gradients included, by hooks. Both go by the order of the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import octavo


@dataclass(frozen=True)
class Place:
    """A tensor of a step. ``product`` is output, grad_input or grad_weight, None for what is no linear layer."""

    layer: str
    product: str | None
    tensor: str

    def __str__(self) -> str:
        product = f"product {self.product}, " if self.product else ""
        return f"layer {self.layer}, {product}tensor {self.tensor}"


def first_bad(model: nn.Module, backward: Callable[[], object]) -> Place | None:
    """The first tensor of ``model`` that holds NaN or inf while ``backward`` runs; None if none does.

    A converted layer's ``input``, ``weight`` and ``grad_output`` are those of its products. Any other layer has
    its result, ``output``, as well. ``gradient of NAME`` is that of a parameter, whose product was the last
    thing to go bad. Compiled blocks run uncompiled meanwhile, and the device is waited for at every layer.
    """
    watched = {name for name, m in model.named_modules() if _is_watched(m)}
    with contextlib.ExitStack() as stack:
        monitor = stack.enter_context(octavo.monitor(model)) if watched else None
        hooks = _Hooks(monitor)
        stack.callback(hooks.remove)
        for name, module in model.named_modules():
            hooks.add(name, module, operands=name not in watched)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        backward()
        return hooks.found or _seen(monitor)


def _is_watched(module: nn.Module) -> bool:
    """Whether a monitor watches ``module``."""
    return isinstance(module, octavo.Linear) and bool(module.recipe.quantized_products)


def _seen(monitor: octavo.Monitor | None) -> Place | None:
    """What ``monitor`` has seen first, up to now."""
    operand = monitor.first_nonfinite() if monitor else None
    return Place(operand.layer, operand.product, operand.operand) if operand else None


class _Hooks:
    """Keeps the first place that one of its hooks, or ``monitor`` before that, found bad."""

    def __init__(self, monitor: octavo.Monitor | None) -> None:
        self.found: Place | None = None
        self._monitor = monitor
        self._handles: list[Any] = []

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def add(self, name: str, module: nn.Module, *, operands: bool) -> None:
        """Watches ``module``: its parameters' gradients, and with ``operands`` what goes in and comes out."""
        own = list(module.named_parameters(recurse=False))
        linear = isinstance(module, nn.Linear)
        for parameter, value in own:
            if value.requires_grad:
                place = Place(name, "grad_weight" if linear else None, f"gradient of {parameter}")
                self._handles.append(
                    value.register_post_accumulate_grad_hook(
                        lambda p, place=place: self._check(p.grad, place)
                    )
                )
        if own and operands:
            forward, backward = ("output", "grad_input") if linear else (None, None)

            def before(_: nn.Module, args: tuple[Any, ...]) -> None:
                for tensor, value in (*(("input", a) for a in args), *module.named_parameters(recurse=False)):
                    self._check(value, Place(name, forward, tensor))

            def backward_check(grad: Tensor) -> None:
                self._check(grad, Place(name, backward, "grad_output"))

            def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                for value in output if isinstance(output, tuple) else (output,):
                    self._check(value, Place(name, forward, "output"))
                    if isinstance(value, Tensor) and value.requires_grad:
                        value.register_hook(backward_check)

            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_forward_hook(after))

    def _check(self, value: Any, place: Place) -> None:
        bad = isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all()
        if self.found is None and bad:
            self.found = _seen(self._monitor) or place
