"""Number formats as data: element types, scale types, blocks, and the tensor that carries them.

A :class:`Format` answers four questions: which 8-, 6- or 4-bit type holds an element, how many elements
share a scale, how the scale is rounded, and in which dtype it is stored. Everything else in the package
reads these constants; a new format is one more constant here and nothing in the kernels' callers.

The scale always decodes: ``x ~ data * scale``.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, replace

import torch

ALL = 0
"""Block extent that means "the whole dimension"."""


@dataclass(frozen=True)
class Element:
    """A narrow floating-point element type.

    ``max`` is the largest finite value, ``emax`` the exponent of the largest normal number's power of two,
    ``mantissa_bits`` the stored mantissa bits, ``packed`` how many elements share one byte.
    Values: OCP 8-bit FP specification 1.0 (e4m3fn, e5m2), OCP MX specification 1.0 (e2m1), and
    "8-bit Numerical Formats for Deep Neural Networks" (arXiv:2206.02915) for the fnuz types.
    """

    name: str
    dtype: torch.dtype
    max: float
    emax: int
    mantissa_bits: int
    min_subnormal: float
    packed: int = 1


E4M3FN = Element("e4m3fn", torch.float8_e4m3fn, 448.0, 8, 3, 2.0**-9)
E4M3FNUZ = Element("e4m3fnuz", torch.float8_e4m3fnuz, 240.0, 7, 3, 2.0**-10)
E5M2 = Element("e5m2", torch.float8_e5m2, 57344.0, 15, 2, 2.0**-16)
E5M2FNUZ = Element("e5m2fnuz", torch.float8_e5m2fnuz, 57344.0, 15, 2, 2.0**-17)
E2M1 = Element("e2m1", torch.float4_e2m1fn_x2, 6.0, 2, 1, 0.5, packed=2)

ELEMENTS = {e.name: e for e in (E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E2M1)}
FNUZ_TWINS = {"e4m3fn": E4M3FNUZ, "e5m2": E5M2FNUZ}
OCP_TWINS = {"e4m3fnuz": E4M3FN, "e5m2fnuz": E5M2}

GRANULARITIES: dict[str, tuple[int, int]] = {
    "tensorwise": (ALL, ALL),
    "rowwise": (1, ALL),
    "columnwise": (ALL, 1),
    "1x128": (1, 128),
    "128x1": (128, 1),
    "128x128": (128, 128),
    "1x32": (1, 32),
}
FLOAT32_ROUNDINGS = ("exact", "power_of_two")
E8M0_ROUNDINGS = ("rceil", "floor", "ceil", "even")

EPS = 1e-12
"""Smallest amax a float32 scale is computed from, so that an all-zero block has a finite scale."""


@dataclass(frozen=True)
class Format:
    """How a tensor is quantized.

    Args:
        element: the element type.
        granularity: a name in :data:`GRANULARITIES`; the block is counted over the last two dimensions
            (rows, columns), any leading dimension keeps scales of its own.
        rounding: ``exact`` and ``power_of_two`` give float32 scales; ``rceil``, ``floor``, ``ceil`` and
            ``even`` give e8m0 scales (OCP MX).

    Raises:
        ValueError: for an unknown granularity or rounding, or e8m0 scales without 1x32 blocks.
    """

    element: Element
    granularity: str
    rounding: str = "exact"

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"unknown granularity {self.granularity!r}; use one of {sorted(GRANULARITIES)}")
        if self.rounding not in FLOAT32_ROUNDINGS + E8M0_ROUNDINGS:
            raise ValueError(
                f"unknown scale rounding {self.rounding!r}; use one of {FLOAT32_ROUNDINGS + E8M0_ROUNDINGS}"
            )
        if self.is_mx != (self.granularity == "1x32"):
            raise ValueError(
                f"{self.granularity!r} blocks with {self.rounding!r} scales are not a format: e8m0 scales "
                f"({', '.join(E8M0_ROUNDINGS)}) go with 1x32 blocks and with nothing else"
            )
        if self.element.packed > 1 and not self.is_mx:
            raise ValueError(f"{self.element.name} needs 1x32 blocks with e8m0 scales (MXFP4)")

    @property
    def is_mx(self) -> bool:
        """Whether the scales are e8m0 (OCP MX)."""
        return self.rounding in E8M0_ROUNDINGS

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float8_e8m0fnu if self.is_mx else torch.float32

    @property
    def block(self) -> tuple[int, int]:
        """(rows, columns) that share a scale; ``ALL`` for a whole dimension."""
        return GRANULARITIES[self.granularity]

    @property
    def key(self) -> str:
        """A string that :meth:`from_key` turns back into this format, for op schemas and files."""
        return f"{self.element.name}:{self.granularity}:{self.rounding}"

    @staticmethod
    @functools.cache
    def from_key(key: str) -> Format:
        """The format that :attr:`key` names, e.g. ``e4m3fn:rowwise:power_of_two``.

        Raises:
            ValueError: if ``key`` is not three known words joined by colons.
        """
        parts = key.split(":")
        if len(parts) != 3 or parts[0] not in ELEMENTS:
            raise ValueError(
                f"{key!r} is no format key: need element:granularity:rounding, e.g. e4m3fn:rowwise:exact, "
                f"with an element of {sorted(ELEMENTS)}"
            )
        return Format(ELEMENTS[parts[0]], parts[1], parts[2])

    def with_family(self, family: str) -> Format:
        """The same format in the ``"ocp"`` or ``"fnuz"`` family; MX formats are OCP on every device."""
        if self.is_mx:
            return self
        twins = FNUZ_TWINS if family == "fnuz" else OCP_TWINS
        return replace(self, element=twins.get(self.element.name, self.element))

    def scale_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the plain scale tensor of a tensor of (unpacked) ``shape`` [..., M, K]."""
        rows, cols = (
            1 if extent == ALL else -(-size // extent)
            for size, extent in zip(shape[-2:], self.block, strict=True)
        )
        return (*shape[:-2], rows, cols)

    def data_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the data tensor (packed elements counted in bytes) of a tensor of ``shape``."""
        return (*shape[:-1], shape[-1] // self.element.packed)

    def __str__(self) -> str:
        return self.key


MXFP8 = Format(E4M3FN, "1x32", "rceil")
MXFP8_E5M2 = Format(E5M2, "1x32", "rceil")
MXFP4 = Format(E2M1, "1x32", "rceil")


class ScaleLayout(enum.Enum):
    """How the scales of a :class:`ScaledTensor` lie in memory."""

    PLAIN = "plain"
    """[..., M blocks, K blocks], contraction (K) fastest."""
    M_MAJOR = "m_major"
    """The same shape with the M blocks fastest, as the Hopper 1x128 product of PyTorch wants it."""
    SWIZZLED_32_4_4 = "swizzled_32_4_4"
    """Flat e8m0 scales in tiles of 128 rows by 4 blocks, as Blackwell's scaled matrix instructions want them."""


@dataclass(frozen=True, eq=False)
class ScaledTensor:
    """A quantized matrix: ``x ~ data * scale``, block by block.

    Args:
        data: [..., M, K] in the element dtype (MXFP4: [..., M, K / 2], the even index in the low nibble).
        scale: float32 or e8m0, [..., M blocks, K blocks] in ``layout``.
        format: the format that both were made by.
        layout: memory layout of ``scale``.
        group_ends: int32 [G], for data whose last dimension holds G groups padded to the block
            (see :func:`octavo.quantize.quantize_grouped`): the padded end of each group.
    """

    data: torch.Tensor
    scale: torch.Tensor
    format: Format
    layout: ScaleLayout = ScaleLayout.PLAIN
    group_ends: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The unpacked shape."""
        *lead, last = self.data.shape
        return torch.Size((*lead, last * self.format.element.packed))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def ndim(self) -> int:
        return self.data.ndim

    def __repr__(self) -> str:
        return f"ScaledTensor({tuple(self.shape)}, {self.format.key}, {self.layout.value}, {self.device})"
