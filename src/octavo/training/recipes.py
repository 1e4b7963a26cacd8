"""Recipes as data: for each of a linear layer's three products, the formats of its two operands.

A recipe is one constant; nothing else in the package asks for a recipe by name. The products are

    output      = x @ w.T        a = x   [M, K]    b = w   [N, K]
    grad_input  = g @ w          a = g   [M, N]    b = w.T [K, N]
    grad_weight = g.T @ x        a = g.T [N, M]    b = x.T [K, M]

each as ``a @ b.T`` with the contraction last; ``None`` keeps a product in the dtype of its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from octavo import hardware
from octavo.formats import E4M3FN, E5M2, MXFP8, Format

PRODUCTS = ("output", "grad_input", "grad_weight")
OPERANDS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
FAMILIES = ("native", "ocp", "fnuz")
FAST_ACCUM = ("default", "all", "none")


@dataclass(frozen=True)
class Product:
    """Formats of the operands ``a`` and ``b`` of one product, and whether it may accumulate fast."""

    a: Format
    b: Format
    fast_accum: bool = False


@dataclass(frozen=True)
class Recipe:
    """How the three products of a linear layer run.

    Args:
        name: how reports call it.
        output, grad_input, grad_weight: a :class:`Product`, or None for high precision.
        family: ``"native"`` takes the FP8 types of the tensor's device; ``"ocp"`` and ``"fnuz"`` ask for
            one on any device, e.g. to compute MI300's numbers on a CPU.
        fast_accum: ``"default"`` as each product says, ``"all"`` or ``"none"`` for every product.

    Raises:
        ValueError: for an unknown family or fast_accum.
    """

    name: str
    output: Product | None = None
    grad_input: Product | None = None
    grad_weight: Product | None = None
    family: str = "native"
    fast_accum: str = "default"

    def __post_init__(self) -> None:
        if self.family not in FAMILIES or self.fast_accum not in FAST_ACCUM:
            raise ValueError(
                f"recipe {self.name!r}: family is one of {FAMILIES} and fast_accum one of {FAST_ACCUM}; got "
                f"{self.family!r} and {self.fast_accum!r}"
            )

    def product(self, name: str, device: torch.device) -> Product | None:
        """The product called ``name`` with its formats in the FP8 family of ``device``."""
        product: Product | None = getattr(self, name)
        if product is None:
            return None
        family = hardware.fp8_family(device) if self.family == "native" else self.family
        fast = product.fast_accum if self.fast_accum == "default" else self.fast_accum == "all"
        return Product(product.a.with_family(family), product.b.with_family(family), fast)

    @property
    def quantized_products(self) -> tuple[str, ...]:
        """Names of the products that run in 8 bits."""
        return tuple(name for name in PRODUCTS if getattr(self, name) is not None)


_ONE = Format(E4M3FN, "tensorwise")
_ONE_WIDE = Format(E5M2, "tensorwise")
_ROW = Format(E4M3FN, "rowwise", "power_of_two")
_ONE_POWER = Format(E4M3FN, "tensorwise", "power_of_two")
_1X128 = Format(E4M3FN, "1x128")
_128X128 = Format(E4M3FN, "128x128")
_128X128_POWER = Format(E4M3FN, "128x128", "power_of_two")

BF16 = Recipe("bf16")
TENSORWISE = Recipe(
    "tensorwise", Product(_ONE, _ONE, fast_accum=True), Product(_ONE_WIDE, _ONE), Product(_ONE_WIDE, _ONE)
)
ROWWISE = Recipe("rowwise", Product(_ROW, _ROW, fast_accum=True), Product(_ROW, _ROW), Product(_ROW, _ROW))
ROWWISE_WITH_GW_HP = Recipe(
    "rowwise_with_gw_hp", Product(_ROW, _ROW, fast_accum=True), Product(_ROW, _ONE_POWER), None
)
ROWWISE_BLOCK_WEIGHT = Recipe(
    "rowwise_block_weight",
    Product(_ROW, _128X128_POWER, fast_accum=True),
    Product(_ROW, _128X128_POWER),
    Product(_ROW, _ROW),
)
"""Rowwise with weights in 128x128 blocks, whose codes serve both directions: FSDP2 gathers them in 8 bits."""
BLOCKWISE = Recipe("blockwise", Product(_1X128, _128X128), Product(_1X128, _128X128), Product(_1X128, _1X128))
MXFP8_RECIPE = Recipe("mxfp8", Product(MXFP8, MXFP8), Product(MXFP8, MXFP8), Product(MXFP8, MXFP8))

RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        BF16, TENSORWISE, ROWWISE, ROWWISE_WITH_GW_HP, ROWWISE_BLOCK_WEIGHT, BLOCKWISE, MXFP8_RECIPE
    )
}  # fmt: skip


def get_recipe(recipe: str | Recipe, **changes: str) -> Recipe:
    """The recipe of that name, or ``recipe`` itself, with fields such as ``fast_accum="all"`` replaced.

    Raises:
        ValueError: for an unknown name.
    """
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise ValueError(f"unknown recipe {recipe!r}; use one of {', '.join(RECIPES)}, or pass a Recipe")
        recipe = RECIPES[recipe]
    return replace(recipe, **changes) if changes else recipe
