"""What the committed tables can launch, as cases that compile without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from octavo import hardware
from octavo.compile_cases import CompileCase
from octavo.formats import E4M3FN, E5M2, MXFP4, MXFP8, MXFP8_E5M2, Format
from octavo.matmul import launch_tables, triton_kernels
from octavo.matmul.launch_tables import Config
from octavo.matmul.triton_launch import constants

_TYPES = {"e4m3fn": "fp8e4nv", "e5m2": "fp8e5", "e4m3fnuz": "fp8e4b8", "e5m2fnuz": "fp8e5b16", "e2m1": "u8"}

Pair = tuple[Format | None, Format | None]


def _formats(element: Any, *granularities: str) -> tuple[Format, ...]:
    return tuple(Format(element, g) for g in granularities)


_ROW, _ONE, _1X128, _128X128 = _formats(E4M3FN, "rowwise", "tensorwise", "1x128", "128x128")
_WIDE_ONE, _WIDE_1X128 = _formats(E5M2, "tensorwise", "1x128")

PAIRS: Mapping[str, tuple[Pair, ...]] = {
    "epilogue": ((_ROW, _ROW), (_WIDE_ONE, _ONE)),
    "block": ((_1X128, _128X128),),
    "blockrows": ((_1X128, _1X128), (_WIDE_1X128, _1X128)),
    "mxfp8": ((MXFP8, MXFP8), (MXFP8_E5M2, MXFP8)),
    "mxfp4": ((MXFP4, MXFP4),),
    "mxmixed": ((MXFP8, MXFP4),),
    "plain": ((None, None),),
    "wide": ((None, None),),
}
"""Formats by kind of work: those of the recipes, and the widest ranges."""

_FORMS = {
    "dense": "scaled_mm_tiles",
    "rows": "grouped_rows_tiles",
    "columns": "grouped_columns_tiles",
}


@dataclass(frozen=True)
class _Case:
    form: str
    work: str
    fast: bool
    config: Config
    a: Format | None
    b: Format | None
    target: str

    def words(self) -> str:
        pair = self.work if self.a is None else f"{_label(self.a)} x {_label(self.b)}"
        limit = "any" if self.config.up_to is None else str(self.config.up_to)
        return f"{pair}{' fast' if self.fast else ''}, rows {limit}"

    def kind(self) -> str:
        if self.work in ("epilogue", "block", "blockrows") or self.config.kind == "block":
            return "product fp8"
        if self.config.kind == "dequantize":
            return "product mx by bf16"
        if self.work == "wide":
            return "general"
        return {"plain": "product bf16", "mxfp4": "product mxfp4"}.get(self.work, "product mxfp8")


def _label(fmt: Format | None) -> str:
    return "" if fmt is None else f"{fmt.element.name} {fmt.granularity}"


def compile_cases(target: str) -> list[CompileCase]:
    """Every product of the table of ``target``, for each pair of formats that it serves."""
    return [_compile_case(case) for case in _cases(target)] + _decoding(target)


def _cases(target: str) -> Iterator[_Case]:
    family = "fnuz" if target in hardware.FNUZ_ARCHITECTURES else "ocp"
    for name, configs in launch_tables.load(target).products.items():
        form, *fast, work = name.split()
        for config in configs:
            if config.kind == "decode_first":
                continue
            for a, b in PAIRS[work]:
                native = [None if fmt is None else fmt.with_family(family) for fmt in (a, b)]
                yield _Case(form, work, bool(fast), config, native[0], native[1], target)


def _compile_case(case: _Case) -> CompileCase:
    config, form = case.config, case.form
    tma = config.tma and case.target.startswith("sm_")
    wide = {"plain": "bf16", "wide": "fp32"}.get(case.work, "")
    sides = {"a": (case.a, config.tile[0]), "b": (case.b, config.tile[1])}
    types = {
        **{name: f"*{_TYPES[fmt.element.name] if fmt else wide}" for name, (fmt, _) in sides.items()},
        **{f"{name}_scale": "*u8" if fmt.is_mx else "*fp32" for name, (fmt, _) in sides.items() if fmt},
        "bias": "*bf16", "out": "*fp32" if wide == "fp32" else "*bf16", "offs": "*i32",
    }  # fmt: skip
    values: dict[str, Any] = {} if case.a else {"a_scale": None, "b_scale": None}
    for name, (fmt, rows) in sides.items():
        pack = 1 if fmt is None else fmt.element.packed
        if tma:
            types[f"{name}_box"] = f"tensordesc<{types[name][1:]}[{rows}, {config.tile[2] // pack}]>"
        else:
            values[f"{name}_box"] = None
    # Unit strides are constants to Triton: the contraction of the data (rows, for the transposed views that a
    # weight gradient in high precision multiplies), and the blocks of the scales.
    turned = form == "columns" and case.a is None
    values |= {"sam": 1, "sbn": 1} if turned else {"sak": 1, "sbk": 1}
    values |= {f"ss{name}k": 1 for name, (fmt, _) in sides.items() if fmt is not None and fmt.block[1]}
    values |= constants(
        case.a, case.b, config, case.target, tail=form == "columns" and case.config.kind != "block",
        tma=tma, fast_accum=case.fast,
    )  # fmt: skip
    values["GROUPS"] = 64
    function = getattr(triton_kernels, _FORMS[form])
    names = list(function.arg_names)
    signature = {n: types.get(n, "i32") for n in names if n not in values}
    token_sizes = ("M", "split_steps", "tiles_m", "sos") if form != "columns" else ()
    return CompileCase(
        kernel=_FORMS[form], configuration=case.words(), room="matmul", kind=case.kind(), function=function,
        signature=signature, constexprs={n: v for n, v in values.items() if n in names},
        divisible=tuple(n for n in signature if n not in token_sizes and not n.endswith("_box") and n != "G"),
        num_warps=config.warps, num_stages=config.stages,
        options=dict(config.options) if case.target.startswith("gfx") else {},
    )  # fmt: skip


def _decoding(target: str) -> list[CompileCase]:
    return [
        CompileCase(
            kernel="decode_mx_tiles", configuration=fmt.element.name, room="matmul", kind="general",
            function=triton_kernels.decode_mx_tiles,
            signature={
                "data": f"*{_TYPES[fmt.element.name]}", "codes": "*u8", "out": "*bf16",
                "M": "i32", "K": "i32", "tiles_k": "i32",
            },
            constexprs={
                "PACK": fmt.element.packed, "TRUNCATE": target == "gfx942", "BLOCK_M": 16, "BLOCK_K": 256,
            },
            divisible=("data", "codes", "out", "K"),
        )
        for fmt in (MXFP8, MXFP8_E5M2, MXFP4)
    ]  # fmt: skip
