"""torchao's names for 8-bit training, so that a script that used ``torchao.float8`` runs with the import changed.

    from octavo.integrations.torchao import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: "lm_head" not in name)

A configuration is translated into an :class:`octavo.Recipe` (:meth:`Float8LinearConfig.recipe`). As in torchao the
filter alone says which layers are converted: without one the output head is converted too, which
:func:`octavo.convert` would leave alone. What has no counterpart raises an error that names it and says what to do.

The names and their defaults are those of torchao 0.19; everything stands in this one module, whichever
submodule of ``torchao.float8`` a script took it from.
"""

from __future__ import annotations

import enum
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from octavo.errors import UserError
from octavo.formats import E4M3FN, E5M2, Element, Format
from octavo.training.convert import convert
from octavo.training.fsdp import prepare_fsdp
from octavo.training.modules import Linear as Float8Linear
from octavo.training.recipes import PRODUCTS, RECIPES, Product, Recipe

__all__ = [
    "CastConfig",
    "Float8GemmConfig",
    "Float8Linear",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "ScalingGranularity",
    "ScalingType",
    "convert_to_float8_training",
    "e4m3_dtype",
    "e5m2_dtype",
    "precompute_float8_dynamic_scale_for_fsdp",
]

e4m3_dtype, e5m2_dtype = torch.float8_e4m3fn, torch.float8_e5m2
"""In a configuration these mean e4m3 and e5m2 in the variant of the tensor's device (fnuz on gfx942)."""

_ELEMENTS: dict[torch.dtype, tuple[Element, str]] = {
    torch.float8_e4m3fn: (E4M3FN, "native"),
    torch.float8_e5m2: (E5M2, "native"),
    torch.float8_e4m3fnuz: (E4M3FN, "fnuz"),
    torch.float8_e5m2fnuz: (E5M2, "fnuz"),
}
"""Element and family of a recipe by ``target_dtype``."""

_DELAYED = "every scale is computed from the tensor it scales; use ScalingType.DYNAMIC and drop the call"
_NO_COUNTERPART = {
    "DelayedScalingConfig": _DELAYED,
    "linear_requires_sync": _DELAYED,
    "sync_float8_amax_and_scale_history": _DELAYED,
    "_auto_filter_for_recipe": "its sizes were measured for torchao's kernels; give octavo.convert a min_size, or "
    "convert_to_float8_training a module_filter_fn of your own",
    "Float8TrainingTensor": "weights stay plain parameters, so there is no tensor to look for",
    "FP8Granularity": "it belongs to inference: see octavo.quantize_weights",
    "Float8MMConfig": "it belongs to inference: see octavo.quantize_weights",
    "GemmInputRole": "the operands of a product are the fields of octavo.Recipe",
    "LinearMMConfig": "the products of a layer are the fields of octavo.Recipe",
    "ScaledMMConfig": "how a product accumulates is octavo.Product.fast_accum",
}


def __getattr__(name: str) -> Any:
    if name in _NO_COUNTERPART:
        # An ImportError, because the text of an AttributeError is lost in ``from ... import name``.
        raise ImportError(f"torchao's {name} has no counterpart in Octavo: {_NO_COUNTERPART[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class ScalingType(enum.Enum):
    """How a tensor is scaled: from its own values, or left in high precision."""

    DYNAMIC = "dynamic"
    DISABLED = "disabled"
    DELAYED = "delayed"
    """Of early torchao; refused by :class:`CastConfig`."""
    STATIC = "static"
    """Of early torchao; refused by :class:`CastConfig`."""


class ScalingGranularity(enum.Enum):
    """What shares a scale: the tensor, or a row along the contraction."""

    TENSORWISE = "tensorwise"
    AXISWISE = "axiswise"


_GRANULARITY = {ScalingGranularity.TENSORWISE: "tensorwise", ScalingGranularity.AXISWISE: "rowwise"}


@dataclass(frozen=True)
class CastConfig:
    """How one operand is quantized.

    Args:
        scaling_type: ``DYNAMIC``, or ``DISABLED`` for high precision.
        scaling_granularity: ``TENSORWISE`` or ``AXISWISE``.
        target_dtype: an 8-bit floating-point dtype; None is e4m3 for inputs and weights, e5m2 for gradients.

    Raises:
        NotImplementedError: for delayed or static scaling.
        UserError: for a dtype that is no FP8 type, or high precision with scales by row.
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.scaling_type in (ScalingType.DELAYED, ScalingType.STATIC):
            raise NotImplementedError(
                f"torchao's ScalingType.{self.scaling_type.name} has no counterpart in Octavo: {_DELAYED}"
            )
        if self.target_dtype is not None and self.target_dtype not in _ELEMENTS:
            raise UserError(f"target_dtype {self.target_dtype} is none of {', '.join(map(str, _ELEMENTS))}")
        if self.disabled and self.scaling_granularity is ScalingGranularity.AXISWISE:
            raise UserError("ScalingType.DISABLED has no scales: leave scaling_granularity at TENSORWISE")

    @property
    def disabled(self) -> bool:
        """Whether the operand stays in high precision."""
        return self.scaling_type is ScalingType.DISABLED


@dataclass(frozen=True)
class Float8GemmConfig:
    """How one product accumulates."""

    use_fast_accum: bool = False


class Float8LinearRecipeName(enum.Enum):
    """Ready configurations; the values are names of Octavo's recipes too."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


@dataclass(frozen=True)
class Float8LinearConfig:
    """How the three products of a linear layer run; the fields are torchao's.

    Args:
        cast_config_input, cast_config_weight, cast_config_grad_output: each operand.
        cast_config_input_for_grad_weight, cast_config_weight_for_grad_input,
            cast_config_grad_output_for_grad_weight: the same operand in its second product; None is the first's.
        gemm_config_output, gemm_config_grad_input, gemm_config_grad_weight: each product.
        enable_fsdp_float8_all_gather: FSDP2 gathers the weights in 8 bits, see :func:`octavo.prepare_fsdp`.
        round_scales_to_power_of_2: scales are powers of two.
        emulate: has no effect, with a warning: where a device has no 8-bit products the operands are decoded anyway.
        pad_inner_dim, force_recompute_fp8_weight_in_bwd: have no effect; products of any size run, and weights
            are always quantized again in backward.

    Raises:
        UserError: if one operand of a product is in high precision and the other is not, or if 8-bit all-gather is
            asked for with weights whose scales are not of the whole tensor.
    """

    cast_config_input: CastConfig = CastConfig()
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = CastConfig()
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = CastConfig()
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    force_recompute_fp8_weight_in_bwd: bool = False
    round_scales_to_power_of_2: bool = False
    delayed_scaling_config: Any = None

    def __post_init__(self) -> None:
        if self.delayed_scaling_config is not None:
            raise NotImplementedError(
                f"torchao's delayed_scaling_config has no counterpart in Octavo: {_DELAYED}"
            )
        granularities = {w.scaling_granularity for _, w in self._casts()[:2]}
        if self.enable_fsdp_float8_all_gather and granularities != {ScalingGranularity.TENSORWISE}:
            raise UserError(
                "enable_fsdp_float8_all_gather needs TENSORWISE scales of the weight in both products, for AXISWISE "
                "ones differ between them; Octavo's recipe 'rowwise_block_weight' is gathered in 8 bits"
            )
        if self.emulate:
            warnings.warn("emulate=True has no effect: Octavo chooses a kernel by device", stacklevel=3)
        self.recipe()

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> Float8LinearConfig:
        """The configuration of that name.

        Raises:
            UserError: for an unknown name.
        """
        names = [n.value for n in Float8LinearRecipeName]
        name = recipe_name.value if isinstance(recipe_name, Float8LinearRecipeName) else recipe_name
        if name not in names:
            raise UserError(
                f"recipe_name is one of {', '.join(names)}, got {recipe_name!r}; octavo.convert knows more: "
                f"{', '.join(RECIPES)}"
            )
        return _CONFIGS[name]()

    def recipe(self) -> Recipe:
        """The :class:`octavo.Recipe` that runs the same products in the same formats.

        Raises:
            UserError: if the operands of one product do not fit together.
        """
        gemms = (self.gemm_config_output, self.gemm_config_grad_input, self.gemm_config_grad_weight)
        defaults = ((e4m3_dtype, e4m3_dtype), (e5m2_dtype, e4m3_dtype), (e5m2_dtype, e4m3_dtype))
        products, families = {}, set()
        for name, (a, b), default, gemm in zip(PRODUCTS, self._casts(), defaults, gemms, strict=True):
            if a.disabled != b.disabled:
                raise UserError(
                    f"the operands of {name} must both be in 8 bits or both in high precision: set "
                    "ScalingType.DISABLED for both or for neither"
                )
            if a.disabled:
                continue
            formats = []
            for cast, dtype in zip((a, b), default, strict=True):
                element, family = _ELEMENTS[cast.target_dtype or dtype]
                rounding = "power_of_two" if self.round_scales_to_power_of_2 else "exact"
                formats.append(Format(element, _GRANULARITY[cast.scaling_granularity], rounding))
                families.add(family)
            products[name] = Product(*formats, fast_accum=gemm.use_fast_accum)
        if len(families) > 1:
            raise UserError("give every target_dtype in its fnuz variant, or none of them")
        recipe = Recipe("torchao", **products, family=next(iter(families), "native"))
        return next((known for known in RECIPES.values() if _alike(known, recipe)), recipe)

    def _casts(self) -> tuple[tuple[CastConfig, CastConfig], ...]:
        """Operands a and b of output, grad_input and grad_weight."""
        return (
            (self.cast_config_input, self.cast_config_weight),
            (
                self.cast_config_grad_output,
                self.cast_config_weight_for_grad_input or self.cast_config_weight,
            ),
            (
                self.cast_config_grad_output_for_grad_weight or self.cast_config_grad_output,
                self.cast_config_input_for_grad_weight or self.cast_config_input,
            ),
        )


def _alike(a: Recipe, b: Recipe) -> bool:
    return a.family == b.family and all(getattr(a, name) == getattr(b, name) for name in PRODUCTS)


_ROW = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
_ROW_E4M3 = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=e4m3_dtype)
_HIGH = CastConfig(scaling_type=ScalingType.DISABLED)

_CONFIGS: dict[str, Callable[[], Float8LinearConfig]] = {
    "tensorwise": Float8LinearConfig,
    "rowwise": lambda: Float8LinearConfig(
        cast_config_input=_ROW,
        cast_config_weight=_ROW,
        cast_config_grad_output=_ROW_E4M3,
        round_scales_to_power_of_2=True,
    ),
    "rowwise_with_gw_hp": lambda: Float8LinearConfig(
        cast_config_input=_ROW,
        cast_config_weight=_ROW,
        cast_config_grad_output=_ROW_E4M3,
        cast_config_weight_for_grad_input=CastConfig(),
        cast_config_input_for_grad_weight=_HIGH,
        cast_config_grad_output_for_grad_weight=_HIGH,
        round_scales_to_power_of_2=True,
    ),
}


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    config: Float8LinearConfig | None = None,
) -> nn.Module:
    """Make linear layers of ``module`` train in 8 bits, in place.

    Args:
        module: any module; a lone ``nn.Linear`` has the path "".
        module_filter_fn: of a linear layer and its path, whether to convert it; None converts all, the output
            head included. It is asked before anything is changed.
        config: None is the tensorwise configuration.

    Returns:
        ``module`` itself.

    Raises:
        ValueError: if nothing was converted. :func:`octavo.convert` says why a layer cannot be.
    """
    config = Float8LinearConfig() if config is None else config
    chosen = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and (module_filter_fn is None or module_filter_fn(layer, name))
    ]
    pattern = f"^({'|'.join(map(re.escape, chosen))})$" if chosen else r"(?!)"
    report = convert(module, config.recipe(), rules=[(pattern, config.recipe()), ("", None)])
    left = [d for d in report.decisions if d.name in set(chosen) and d.recipe is None]
    for decision in left:
        warnings.warn(f"{decision.name} was not converted: {decision.reason}", stacklevel=2)
    if config.enable_fsdp_float8_all_gather:
        prepare_fsdp(module)
    return module


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Does nothing: with 8-bit all-gather the first gather after an optimizer step joins the scales of all weights.

    It takes one all-reduce for the model, which is what this call saves in torchao.

    Raises:
        UserError: if no layer of ``module`` was converted.
    """
    if not any(isinstance(m, Float8Linear) for m in module.modules()):
        raise UserError("no layer of this module was converted: call convert_to_float8_training first")
