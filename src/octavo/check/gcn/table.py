"""The instruction table: mnemonic to builder.

A builder takes a decoded instruction once, before execution, and returns `run(machine)`. Most vector instructions
are one line of data, `valu("v_add_u32", "u32", "u32 u32", function)`; this module supplies what they share: operand
types, negation and absolute value, op_sel, output modifiers, SDWA and DPP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .asm import Instruction, Operand
from .errors import UnsupportedInstruction
from .lanes import dpp_control, sdwa_select, sdwa_writer
from .operands import DTYPES, FLOATS, Reader, raw32, reader, width, writer
from .state import Machine

Run = Callable[[Machine], None]
Builder = Callable[[Instruction], Run]


@dataclass(frozen=True)
class Entry:
    """`targets` empty means every target; `build` makes the function that executes a decoded instruction."""

    build: Builder
    targets: tuple[str, ...] = ()


TABLE: dict[str, Entry] = {}


def register(names: str | Iterable[str], build: Builder, targets: tuple[str, ...] = ()) -> None:
    """Add a builder under one or more mnemonics (without encoding suffix)."""
    for name in names.split() if isinstance(names, str) else names:
        if name in TABLE:
            raise ValueError(f"{name} is defined twice")
        TABLE[name] = Entry(build, targets)


def instruction(names: str, targets: tuple[str, ...] = ()) -> Callable[[Builder], Builder]:
    """Decorator form of `register`."""

    def add(build: Builder) -> Builder:
        register(names, build, targets)
        return build

    return add


def build(ins: Instruction, target: str) -> Run:
    """Decode one instruction for a target. Raises UnsupportedInstruction for anything not in the table."""
    entry = TABLE.get(ins.name)
    if entry is None:
        raise UnsupportedInstruction(f"{ins.where()}: no definition of {ins.name}")
    if entry.targets and target not in entry.targets:
        raise UnsupportedInstruction(f"{ins.where()}: {ins.name} does not exist on {target}")
    run = entry.build(ins)
    if ins.modifiers:
        raise ins.unsupported(f"modifier {', '.join(ins.modifiers)} is not modelled for {ins.name}")
    return run


_OUTPUT_SCALE = {("mul", "2"): 2.0, ("mul", "4"): 4.0, ("div", "2"): 0.5}


def output_modifier(ins: Instruction, kind: str) -> Callable[[Any], Any] | None:
    """clamp and omod of a float result (None where there is none)."""
    scale = next((s for (name, value), s in _OUTPUT_SCALE.items() if ins.modifiers.get(name) == value), None)
    if scale is not None:
        ins.take("mul")
        ins.take("div")
    clamp = ins.take_flag("clamp")
    if scale is None and not clamp:
        return None
    if kind not in FLOATS:
        raise ins.unsupported(f"clamp or output scale on a {kind} result")
    dtype = DTYPES[kind]

    def modify(x: Any) -> Any:
        if scale is not None:
            x = x * dtype(scale)
        # DX10_CLAMP is on in every kernel we compile: NaN clamps to 0.
        return np.where(np.isnan(x), dtype(0), np.clip(x, dtype(0), dtype(1))) if clamp else x

    return modify


@dataclass(frozen=True)
class Signature:
    """Types of destinations and sources; `accumulate` reads the destination as last source (v_fmac);
    `vcc_in` and `vcc_out` say that encodings without the operand read or write VCC."""

    dst: tuple[str, ...]
    src: tuple[str, ...]
    accumulate: bool = False


VCC_OPERAND = Operand("s", 106, 2, text="vcc")


def valu(
    names: str,
    dst: str,
    src: str,
    function: Callable[..., Any],
    *,
    accumulate: bool = False,
    targets: tuple[str, ...] = (),
) -> None:
    """Define a vector instruction by types and a function over lane arrays.

    `dst` and `src` are type names separated by spaces. With two destinations the function returns a pair.
    """
    signature = Signature(tuple(dst.split()), tuple(src.split()), accumulate)
    register(names, lambda ins: build_valu(ins, signature, function), targets)


def build_valu(ins: Instruction, signature: Signature, function: Callable[..., Any]) -> Run:
    """Builder shared by all VALU instructions that compute lane by lane."""
    n = len(signature.dst)
    destinations, sources = ins.operands[:n], ins.operands[n:]
    if signature.accumulate:
        sources = (*sources, destinations[0])
    if len(sources) != len(signature.src) or len(destinations) != n:
        raise ins.unsupported(f"{len(ins.operands)} operands")
    raws: list[Reader | None] = [None] * len(sources)
    where: Callable[[Machine], np.ndarray | None] = lambda m: None  # noqa: E731
    writers = None
    selects = [0] * (len(sources) + 1)
    if ins.encoding == "sdwa":
        raws = [
            sdwa_select(ins, o, i) if t != "mask" else None
            for i, (o, t) in enumerate(zip(sources, signature.src))
        ]
        if signature.dst[0] != "mask":
            writers = [sdwa_writer(ins, destinations[0], width(signature.dst[0]))]
    elif ins.encoding == "dpp":
        control = dpp_control(ins)
        word = raw32(sources[0], ins)
        raws[0] = lambda m: control.move(m, word(m))
        where = control.written
    else:
        selects = list(ins.take_list("op_sel", len(sources) + 1, 0))
    readers = [
        reader(o, t, ins, raw, bool(high))
        for o, t, raw, high in zip(sources, signature.src, raws, selects, strict=False)
    ]
    if writers is None:
        writers = [
            writer(o, t, ins, bool(selects[-1])) for o, t in zip(destinations, signature.dst, strict=True)
        ]
    modify = output_modifier(ins, signature.dst[0])
    if n == 1:
        write = writers[0]

        def run(m: Machine) -> None:
            result = function(*[read(m) for read in readers])
            write(m, modify(result) if modify else result, where(m))

        return run
    if modify:
        raise ins.unsupported("output modifier on an instruction with two results")

    def run_pair(m: Machine) -> None:
        for write, result in zip(writers, function(*[read(m) for read in readers]), strict=True):
            write(m, result, where(m))

    return run_pair
