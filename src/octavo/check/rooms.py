"""Cases of rooms that yield none themselves: launches recorded from calls that reach every entry of their tables.

A kernel that a room's `compile_cases` yields is left to it (`octavo.check.catalog`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from octavo import hardware
from octavo.check.launches import Launch, recording
from octavo.compile_cases import CompileCase
from octavo.formats import E2M1, E4M3FN, E5M2, Format, ScaledTensor, ScaleLayout

Call = tuple[str, Callable[[], Any]]
"""A few words for the configuration, and a call of the room's launch code."""

ROWS = 64
_PRODUCTS = (
    "attention_forward",
    "attention_backward_keys",
    "attention_backward_queries",
    "gemm_decoding_tiles",
    "scaled_mm_tiles",
)
"""Kernels of the rooms below that multiply 16-bit matrices."""
_BF16, _FP32 = torch.bfloat16, torch.float32
_SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}


def compile_cases(target: str) -> list[CompileCase]:
    """Every distinct launch of the rooms below on `target`, named after the first call that made it."""
    cases: list[CompileCase] = []
    seen: set[str] = set()
    for room, (module, calls) in _ROOMS.items():
        launch = _import(module)
        if launch is not None:
            cases += _record(room, calls(launch, target), target, seen)
    return cases


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            return None
        raise


def _record(room: str, calls: Iterator[Call], target: str, seen: set[str]) -> Iterator[CompileCase]:
    for words, call in calls:
        with recording(target) as launches:
            call()
        for launch in launches:
            if launch.identity not in seen:
                seen.add(launch.identity)
                place = _place(launches, launch)
                yield launch.case(words if place < 2 else f"{words}, part {place}", room, _kind(launch))


def _place(launches: list[Launch], last: Launch) -> int:
    """Which launch of its kernel `last` is within one call: 1 for the first."""
    return sum(launch.function is last.function for launch in launches[: launches.index(last) + 1])


def _kind(launch: Launch) -> str:
    if launch.function.__name__ == "gemm_decoding_tiles" and launch.constexprs["B_KIND"] != "plain":
        native = "product mxfp4" if launch.constexprs["B_PACK"] == 2 else "product mxfp8"
        return native if launch.constexprs["NATIVE"] else "product mx by bf16"
    if launch.function.__name__ in _PRODUCTS:
        return "product bf16"
    casts = [v for k, v in launch.constexprs.items() if k.split("_")[-1] == "CAST" and v]
    if not casts:
        return "general"
    return "quantize by integers" if set(casts) == {"none"} else "quantize fp8"


# ---- quantize -----------------------------------------------------------------------------------------------


def _quantize(launch: ModuleType, target: str) -> Iterator[Call]:
    family = "fnuz" if target in hardware.FNUZ_ARCHITECTURES else "ocp"
    other = "ocp" if family == "fnuz" else "fnuz"

    def fmt(name: str, element: Any = E4M3FN, rounding: str = "exact", of: str = family) -> Format:
        return Format(element, name, rounding).with_family(of)

    row, one = fmt("rowwise", rounding="power_of_two"), fmt("tensorwise")
    for columns in (*(2**k for k in range(7, 16)), 65536):
        yield (
            f"{row.key} bf16 K={columns}",
            _both_ways(launch, "quantize", _BF16, row, False, columns=columns),
        )
    formats = [
        one,
        fmt("tensorwise", E5M2),
        fmt("1x128"),
        fmt("128x128"),
        fmt("128x1"),
        fmt("columnwise"),
        row,
    ]
    formats += [fmt("1x32", E4M3FN, "rceil"), fmt("1x32", E5M2, "rceil"), fmt("1x32", E2M1, "rceil")]
    for f in formats:
        # Weights are quantized from float32 where they are kept so; one format of each kind shows that.
        for dtype in (_BF16, _FP32) if f in (row, formats[3]) else (_BF16,):
            for turned in (False, True):
                words = f"{f.key} {_SHORT[dtype]}{' transposed' if turned else ''}"
                yield words, _both_ways(launch, "quantize", dtype, f, turned)
    for f, t in [(f, f) for f in formats if f.granularity not in ("128x1", "columnwise")] + [(row, one)]:
        words = f"{f.key} and transposed" + (f" {t.key}" if t != f else "")
        yield f"{words} bf16", _both_ways(launch, "quantize_both", _BF16, f, t)
    for rounding in ("floor", "ceil", "even"):
        f = fmt("1x32", E4M3FN, rounding)
        yield f"{f.key} bf16", _both_ways(launch, "quantize", _BF16, f, False)
    foreign = fmt("rowwise", of=other)
    yield f"{foreign.key} bf16", _both_ways(launch, "quantize", _BF16, foreign, False)
    # Tiles of the tuner's candidates that the table may not name.
    shown = [(None, row), (None, fmt("1x128")), (None, formats[-3]), (row, row), (formats[-3], formats[-3])]
    shown += [(fmt("1x128"), fmt("1x128")), (one, one), (fmt("128x128"), fmt("128x128"))]
    for f, t in shown:
        key = f"{t.key} transposed" if f is None else f"{f.key} and transposed"
        yield f"{key} by quads", _by_quads(launch, f, t)
    yield from _grouped(launch, [row, one, fmt("1x128"), fmt("1x32", E4M3FN, "rceil")])


def _both_ways(
    launch: ModuleType, name: str, dtype: torch.dtype, *formats: Any, columns: int = 4096
) -> Callable[[], Any]:
    rows = 2 * 128 if columns == 4096 else ROWS
    return lambda: getattr(launch, name)(torch.zeros(rows, columns, dtype=dtype), *formats)


def _by_quads(launch: ModuleType, f: Format | None, t: Format) -> Callable[[], Any]:
    from octavo.quantize import candidates, launch_tables

    def call() -> None:
        kind = "turned" if f is None else "both"
        bucket = f"{kind}/{t.granularity}"
        size = (
            (128, 128, 8) if t.granularity == "128x128" or (f and t.granularity == "1x128") else (128, 64, 4)
        )
        (table,) = candidates.tiles(bucket, size, quads=1, apart=0 if f is None else 2)
        with launch_tables.override({**table, "rows_first": {"any": {"enabled": 0}}}):
            launch.quantize_optional(torch.zeros(256, 4096, dtype=_BF16), f, t)

    return call


def _grouped(launch: ModuleType, formats: list[Format]) -> Iterator[Call]:
    offs = torch.arange(32, 32 * 9, 32, dtype=torch.int32)

    def call(f: Format, turned: bool) -> Callable[[], Any]:
        return lambda: launch.quantize_groups(torch.zeros(256, 4096, dtype=_BF16), offs, f, turned, 128)

    for f in formats:
        if f.granularity == "tensorwise":
            yield f"{f.key} bf16 G=8", call(f, False)
        yield f"{f.key} bf16 G=8 transposed", call(f, True)


# ---- fused --------------------------------------------------------------------------------------------------


def _fused(launch: ModuleType, target: str) -> Iterator[Call]:
    """SwiGLU quantized as it is computed: forward rows, and the backward pass in every recipe's formats."""
    family = "fnuz" if target in hardware.FNUZ_ARCHITECTURES else "ocp"
    names = {"rowwise": "power_of_two", "tensorwise": "exact", "1x128": "exact", "1x32": "rceil"}
    for name, rounding in names.items():
        f = Format(E4M3FN, name, rounding).with_family(family)
        h, grad = torch.zeros(256, 8192, dtype=_BF16), torch.zeros(256, 4096, dtype=_BF16)
        yield f"{f.key} swiglu", lambda f=f, h=h: launch.swiglu_quantize(h, f)
        yield (
            f"{f.key} swiglu backward",
            lambda f=f, h=h, grad=grad: launch.swiglu_backward_quantize(h, grad, f, f, f, False),
        )


def _experts(launch: ModuleType, target: str) -> Iterator[Call]:
    """The expert MLP's own kernels, with the router's weights and without; quantization is another room's."""
    f = Format(E4M3FN, "rowwise", "power_of_two").with_family(
        "fnuz" if target in hardware.FNUZ_ARCHITECTURES else "ocp"
    )
    offs = torch.tensor([100, 100, 240, 256], dtype=torch.int32)
    for dtype in (_BF16, _FP32):
        h, grad, scores = (
            torch.zeros(256, 4096, dtype=dtype),
            torch.zeros(256, 2048, dtype=dtype),
            torch.zeros(256),
        )
        back = torch.zeros(64, 4, dtype=torch.int64)
        for s in (scores, None):
            words = f"{_SHORT[dtype]} {'scored' if s is not None else 'sorted rows'}"
            yield (
                f"{words} swiglu backward",
                lambda h=h, g=grad, s=s: launch.swiglu_backward_rows(h, g, s, offs, f, f, f, 16, False),
            )
            yield (
                f"{words} combine",
                lambda g=grad, s=s, back=back: launch.combine_rows(
                    g, back, None if s is None else s.view(64, 4)
                ),
            )


# ---- matmul -------------------------------------------------------------------------------------------------


def _matmul(launch: ModuleType, target: str) -> Iterator[Call]:
    """A product of few rows and a long contraction, whose parts are added; the tiles have cases of their own."""
    family = "fnuz" if target in hardware.FNUZ_ARCHITECTURES else "ocp"
    row = Format(E4M3FN, "rowwise").with_family(family)

    def side(rows: int) -> ScaledTensor:
        return ScaledTensor(torch.zeros(rows, 8192).to(row.element.dtype), torch.zeros(rows, 1), row)

    for bias in (None, torch.zeros(256, dtype=_BF16)):
        words = f"split product{'' if bias is None else ' with bias'}"
        yield words, lambda bias=bias: launch.scaled_mm(side(16), side(256), bias, _BF16, False)


def _zeros(launch: ModuleType, target: str) -> Iterator[Call]:
    """What is written over the outputs of PyTorch's grouped products."""
    offs = torch.tensor([16, 16, 48, 64], dtype=torch.int32)
    yield "bf16 rows", lambda: launch.zero_tail(torch.zeros(64, 2048, dtype=_BF16), offs)
    yield "bf16 groups", lambda: launch.zero_empty_groups(torch.zeros(4, 64, 2048, dtype=_BF16), offs)


# ---- operators ----------------------------------------------------------------------------------------------

_PROGRAMS = 608
"""Programs that fill the device twice: 304 compute units; the plans use it for shapes with few rows alone."""


def _topk(launch: ModuleType, target: str) -> Iterator[Call]:
    plans = launch.plans

    def call(m: int, n: int, k: int, dtype: torch.dtype) -> Callable[[], Any]:
        def topk() -> None:
            x = torch.zeros(m, n, dtype=dtype)
            plan = plans.choose(m, n, k, x.element_size(), _PROGRAMS)
            launch.topk_rows(x, k, True, True, plan, x.new_empty(m, k), torch.empty(m, k, dtype=torch.int64))

        return topk

    # One shape for each kernel and way to launch it. Lists of 32 are left out: their sorting networks take the
    # compiler a minute each.
    shapes = [
        (2048, 256, 8),
        (64, 4096, 8),
        (64, 16384, 32),
        (64, 32768, 64),
        (64, 8192, 2048),
        (2, 262144, 64),
    ]
    for m, n, k in shapes:
        for dtype in (_BF16, _FP32) if k == 8 else (_BF16,):
            yield f"{_SHORT[dtype]} n={n} k={k}{' split' if m == 2 else ''}", call(m, n, k, dtype)


def _rms_norm(launch: ModuleType, target: str) -> Iterator[Call]:
    plans = launch.plans
    lanes = 64 if target.startswith("gfx") else 32

    def forward(m: int, n: int, dtype: torch.dtype) -> Callable[[], Any]:
        def call() -> None:
            x, weight = torch.zeros(m, n, dtype=dtype), torch.zeros(n, dtype=dtype)
            plan = plans.choose_forward(m, n, x.element_size(), _PROGRAMS, lanes)
            launch.forward(x, weight, 1e-6, torch.empty_like(x), torch.empty(m), plan)

        return call

    def backward(m: int, n: int, dtype: torch.dtype) -> Callable[[], Any]:
        def call() -> None:
            x, weight = torch.zeros(m, n, dtype=dtype), torch.zeros(n, dtype=dtype)
            plan = plans.choose_backward(m, n, x.element_size(), _PROGRAMS, lanes)
            dx, dw = torch.empty_like(x), torch.empty_like(weight)
            launch.backward(x, x, weight, torch.empty(m), dx, dw, plan)

        return call

    shapes = [(256, 256), (256, 1024), (256, 4096), (256, 8192), (256, 16384), (256, 65536), (4, 65536)]
    for m, n in shapes:
        for dtype in (_BF16, _FP32) if n in (4096, 65536) else (_BF16,):
            words = f"{_SHORT[dtype]} n={n}{' few rows' if m == 4 else ''}"
            yield f"{words} forward", forward(m, n, dtype)
            yield f"{words} backward", backward(m, n, dtype)


def _attention(launch: ModuleType, target: str) -> Iterator[Call]:
    """Each line of the target's table, causal, and one call that is not; deterministic and with added sums."""
    from octavo.operators.attention import plan as plans

    def call(dim: int, value_dim: int, causal: bool, fused: bool) -> Callable[[], Any]:
        def attention() -> None:
            q, k = (torch.zeros(1, heads, 256, dim, dtype=_BF16) for heads in (4, 2))
            v, g = (torch.zeros(1, heads, 256, value_dim, dtype=_BF16) for heads in (2, 4))
            plan = replace(plans.choose(target, dim, value_dim, causal), fused=fused)
            out, lse = launch.forward(q, k, v, causal, 0.125, plan)
            launch.backward(g, q, k, v, out, lse, causal, 0.125, plan)

        return attention

    for dim, value_dim in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
        yield f"bf16 D={dim} Dv={value_dim} causal", call(dim, value_dim, True, False)
    yield "bf16 D=128 Dv=128", call(128, 128, False, False)
    yield "bf16 D=128 Dv=128 causal, sums added", call(128, 128, True, True)


def _gemm(launch: ModuleType, target: str) -> Iterator[Call]:
    """Each line of the target's table of plans; scales swizzled and plain, which one source reads."""
    from octavo.operators.gemm import plan as plans
    from octavo.operators.gemm.reference import swizzled_size

    n, k = 256, 1024

    def side(rows: int, fmt: Format, swizzled: bool) -> ScaledTensor:
        data = torch.zeros(fmt.data_shape((rows, k)), dtype=torch.uint8).view(fmt.element.dtype)
        if not swizzled:
            return ScaledTensor(data, torch.zeros(fmt.scale_shape((rows, k))).to(fmt.scale_dtype), fmt)
        flat = torch.zeros(swizzled_size(rows, k // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        return ScaledTensor(data, flat, fmt, ScaleLayout.SWIZZLED_32_4_4)

    def call(plan: Any, a: Format | torch.dtype, b: Format | None, swizzled: bool) -> Callable[[], Any]:
        def product() -> None:
            rows = min(plan.up_to or 256, 256)
            left = torch.zeros(rows, k, dtype=a) if isinstance(a, torch.dtype) else side(rows, a, swizzled)
            right = torch.zeros(n, k, dtype=a) if isinstance(a, torch.dtype) else None
            out = torch.zeros(rows, n, dtype=_BF16 if isinstance(a, Format) else a)
            launch.product(left, right if b is None else side(n, b, swizzled), None, out, plan)

        return product

    e4m3, e5m2, e2m1 = (Format(element, "1x32", "rceil") for element in (E4M3FN, E5M2, E2M1))
    block = Format(E4M3FN, "128x128")
    pairs: dict[str, list[tuple[Any, Any]]] = {
        "mxfp8": [(e4m3, e4m3), (e5m2, e4m3)], "mxfp4": [(e2m1, e2m1)],
        **{f"16-bit x {name}": [(_BF16, b), (torch.float16, b)] for name, b in
           (("mxfp8", e4m3), ("mxfp4", e2m1), ("block", block))},
        "16-bit": [(_BF16, None), (torch.float16, None)],
    }  # fmt: skip
    tables = plans.tables()
    for work, lines in tables.get(target, tables["other"]).items():
        for plan in lines:
            for a, b in pairs[work]:
                limit = "any" if plan.up_to is None else str(plan.up_to)
                first = a.element.name if isinstance(a, Format) else _SHORT[a]
                for swizzled in (False, True) if isinstance(a, Format) and a is not e5m2 else (False,):
                    words = f"{first} {work}, rows {limit}{' swizzled' if swizzled else ''}"
                    yield words, call(plan, a, b, swizzled)


_ROOMS: dict[str, tuple[str, Callable[[ModuleType, str], Iterator[Call]]]] = {
    "quantize": ("octavo.quantize.triton_launch", _quantize),
    "fused": ("octavo.fused.triton_launch", _fused),
    "experts": ("octavo.fused.experts_launch", _experts),
    "matmul": ("octavo.matmul.triton_launch", _matmul),
    "zeros": ("octavo.matmul.zero_launch", _zeros),
    "topk": ("octavo.operators.topk.launch", _topk),
    "rms_norm": ("octavo.operators.rms_norm.launch", _rms_norm),
    "attention": ("octavo.operators.attention.launch", _attention),
    "gemm": ("octavo.operators.gemm.launch", _gemm),
}
