"""Make Triton's interpreter convert and multiply narrow floats as the hardware does.

Stock ``TRITON_INTERPRET=1`` rounds FP8 ties away from zero and loses their carries, decodes FP8 NaN to
numbers, misreads bfloat16 subnormals, truncates float32 to bfloat16, and multiplies the raw bits of bfloat16
in ``tl.dot``. :func:`install` sends conversions through ``ml_dtypes`` (nearest even; FP8 saturates, NaN is the
one positive code) and products through float32.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def install() -> None:
    """Patch the interpreter of this process, once.

    Raises:
        ImportError: without triton or ml_dtypes (``pip install 'octavo[amd-check]'``).
    """
    import ml_dtypes
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    handle: Any = interpreter.TensorHandle
    builder: Any = interpreter.InterpreterBuilder
    native: dict[Any, Any] = {tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64}
    stored_as_bits = {
        tl.bfloat16: ml_dtypes.bfloat16,
        tl.float8e4nv: ml_dtypes.float8_e4m3fn,
        tl.float8e4b8: ml_dtypes.float8_e4m3fnuz,
        tl.float8e5: ml_dtypes.float8_e5m2,
        tl.float8e5b16: ml_dtypes.float8_e5m2fnuz,
    }
    floats = native | stored_as_bits

    def values(operand: Any) -> Any:
        kind = operand.dtype.scalar
        return operand.data.view(stored_as_bits[kind]) if kind in stored_as_bits else operand.data

    def convert(source: Any, target: Any) -> Any:
        kind = target.scalar
        value = values(source).astype(np.float64 if source.dtype.scalar == tl.float64 else np.float32)
        if kind.primitive_bitwidth == 8:
            limit = float(ml_dtypes.finfo(stored_as_bits[kind]).max)
            value = np.where(np.isnan(value), np.float32(np.nan), np.clip(value, -limit, limit))
        result = value.astype(floats[kind])
        return handle(result.view(f"u{result.itemsize}") if kind in stored_as_bits else result, kind)

    stock_cast = builder.cast_impl

    def cast(self: Any, source: Any, target: Any) -> Any:
        both_floats = source.dtype.scalar in floats and target.scalar in floats
        return convert(source, target) if both_floats else stock_cast(self, source, target)

    def dot(self: Any, a: Any, b: Any, d: Any, *_precision: Any) -> Any:
        wide = [values(o).astype(d.data.dtype) for o in (a, b)]
        return handle(np.matmul(*wide) + d.data, d.dtype.scalar)

    builder.cast_impl = cast
    builder.create_fp_to_fp = lambda self, source, target, _rounding: cast(self, source, target)
    builder.create_dot = dot
