"""Watch what quantization does to a run: ranges, saturation, underflow and SQNR of every operand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from octavo.training import experts
from octavo.training.expert_spanning import NOBODY
from octavo.training.modules import Linear
from octavo.training.observe import FIELDS, new_stats
from octavo.training.recipes import OPERANDS, PRODUCTS


@dataclass(frozen=True)
class OperandStats:
    """One operand of one product of one layer, over the watched steps since the last :meth:`Monitor.reset`.

    ``amax`` is over finite values; ``saturated`` is the share of elements clipped by more than half a step,
    ``underflowed`` the share of non-zero elements that became zero, ``nonfinite`` the share of NaN and inf,
    ``sqnr_db`` the signal over the quantization error in dB (inf where nothing was lost).
    """

    layer: str
    product: str
    operand: str
    amax: float
    saturated: float
    underflowed: float
    nonfinite: float
    sqnr_db: float


@dataclass(frozen=True)
class _Watched:
    """A module, what its ``stats`` are while it is watched, and what they are otherwise."""

    module: Any
    stats: Any
    nobody: Any


def _watchable(model: nn.Module) -> Iterator[tuple[Any, tuple[str, ...], Any]]:
    """Every module with quantized products: itself, the names of its layers, and its ``stats`` unwatched."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.recipe.quantized_products:
            yield module, (name,), None
    for name, bank in experts.converted(model):
        if bank.recipe.quantized_products:
            prefix = f"{name}." if name else ""
            yield bank, (f"{prefix}gate_up", f"{prefix}down"), NOBODY


class Monitor:
    """Statistics of the operands of every converted layer; made by :func:`monitor`.

    Experts count as two layers, ``gate_up`` and ``down`` under the path of their bank: the input of the first is
    the rows of the tokens as they are sent to experts, and rows that are sent to none are left out.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        found = list(_watchable(model))
        if not found:
            raise ValueError("the model has no converted layer to watch: call octavo.convert(model) first")
        if every < 1:
            raise ValueError(f"every must be at least 1; got {every}")
        self.every, self.step = every, 0
        self._stats: dict[str, torch.Tensor] = {}
        self._layers: list[_Watched] = []
        for module, names, nobody in found:
            device = next(module.parameters()).device
            buffers = tuple(self._stats.setdefault(name, new_stats(device)) for name in names)
            self._layers.append(
                _Watched(module, buffers if isinstance(nobody, tuple) else buffers[0], nobody)
            )
        self._handle = model.register_forward_pre_hook(self._before_forward)
        # A model that has run compiled does not notice a new hook; it does notice this, and traces again.
        self._watch(True)

    def _watch(self, on: bool) -> None:
        for layer in self._layers:
            layer.module.stats = layer.stats if on else layer.nobody

    def _before_forward(self, module: nn.Module, args: object) -> None:
        watch = module.training and self.step % self.every == 0
        self.step += module.training
        self._watch(watch)

    def read(self) -> list[OperandStats]:
        """What was gathered, layer by layer; the only call that waits for the device."""
        return [_operand(*operand, cell) for operand, cell in self._cells()]

    def first_nonfinite(self) -> OperandStats | None:
        """The operand that held NaN or inf first, in the order in which the operands were computed.

        None if none did. That order is the one of the run, forward and backward, whatever the order in which
        the model lists its layers. An operand that is named went bad before its product: in the weight
        itself, or in what lies between this layer and the one that ran before. Waits for the device.
        """
        turn = FIELDS.index("first_bad")
        bad = [(cell[turn], operand, cell) for operand, cell in self._cells() if cell[turn]]
        if not bad:
            return None
        _, operand, cell = min(bad)
        return _operand(*operand, cell)

    def _cells(self) -> list[tuple[tuple[str, str, str], list[float]]]:
        """Layer, product, operand and fields of every operand that was seen."""
        table = torch.stack([s.cpu() for s in self._stats.values()]).tolist()
        return [
            ((layer, product, OPERANDS[product][j]), cells[i][j])
            for layer, cells in zip(self._stats, table, strict=True)
            for i, product in enumerate(PRODUCTS)
            for j in (0, 1)
            if cells[i][j][FIELDS.index("elements")] > 0
        ]

    def reset(self) -> None:
        """Forget what was gathered."""
        for stats in self._stats.values():
            stats.zero_()

    def close(self) -> None:
        """Stop watching; what was gathered can still be read."""
        self._handle.remove()
        self._watch(False)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        rows = [("layer", "product", "operand", "amax", "saturated", "underflowed", "nonfinite", "SQNR dB")]
        rows += [
            (s.layer, s.product, s.operand, f"{s.amax:.4g}", f"{s.saturated:.2%}", f"{s.underflowed:.2%}",
             f"{s.nonfinite:.2%}" if s.nonfinite else "0", f"{s.sqnr_db:.1f}")
            for s in self.read()
        ]  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows)


def _operand(layer: str, product: str, operand: str, cell: list[float]) -> OperandStats:
    value = dict(zip(FIELDS, cell, strict=True))
    noise, signal = value["noise"], value["signal"]
    sqnr = math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal > 0 else -math.inf
    return OperandStats(
        layer, product, operand, value["amax"], value["saturated"] / value["elements"],
        value["underflowed"] / max(value["nonzero"], 1.0), value["nonfinite"] / value["elements"], sqnr,
    )  # fmt: skip


def monitor(model: nn.Module, *, every: int = 1) -> Monitor:
    """Watch every ``every``-th training step of a converted model, without synchronising in between.

    Args:
        model: its forward marks the steps; layers converted later are not watched.
        every: watch one step of so many. With more than one, give a model to ``torch.compile`` that has not run
            yet, or compile its blocks one by one: code made without the monitor may run again after the first
            step, and is not watched.

    Returns:
        A :class:`Monitor`, also a context manager: ``print(m)``, ``m.read()``, ``m.first_nonfinite()``.

    Raises:
        ValueError: if the model has no converted layer, or ``every`` is below 1.
    """
    return Monitor(model, every)
