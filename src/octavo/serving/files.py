"""Quantized weights in safetensors with a standard ``quantization_config``, written and read in one line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.models.safetensors_files import (
    INDEX,
    SINGLE,
    Stored,
    TensorFiles,
    Writer,
    opened,
    read_json,
    shards,
)
from octavo.serving.schemes import SCHEMES, Scheme
from octavo.serving.weights import QuantizedLinear, quantize_weights

MAX_SHARD_BYTES = 5 * 10**9
CONFIG = "config.json"


def save(model: nn.Module, folder: Path | str, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> list[Path]:
    """Write a model whose weights ``quantize_weights`` quantized.

    ``config.json`` is the model's own (a transformers model's ``config``) with ``quantization_config`` added. An error
    on the way, such as a full disk, leaves what was in the folder as it was.

    Args:
        model: with at least one :class:`QuantizedLinear`, all of one scheme.
        folder: made if missing.
        max_shard_bytes: largest file of weights.

    Returns:
        The files written.

    Raises:
        ValueError: the model has no quantized layer, or layers of several schemes.
        OSError: a file cannot be written.
    """
    scheme = _scheme_of(model)
    tensors = dict(_named_tensors(model))
    groups = shards({name: t.numel() * t.element_size() for name, t in tensors.items()}, max_shard_bytes)
    names = [SINGLE] if len(groups) == 1 else [
        f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))
    ]  # fmt: skip
    kept = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    with Writer(Path(folder)) as writer:
        for name, group in zip(names, groups):
            writer.tensors(name, {key: tensors[key].detach().cpu().contiguous() for key in group})
        if len(groups) > 1:
            total = sum(t.numel() * t.element_size() for t in tensors.values())
            where = {key: name for name, group in zip(names, groups) for key in group}
            writer.json(INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        writer.json(CONFIG, {**_config_of(model), "quantization_config": scheme.quantization_config(kept)})
        return writer.commit(last=[INDEX] if len(groups) == 1 else [SINGLE])


def load(model: nn.Module, folder: Path | str, *, activations: str | None = None) -> nn.Module:
    """Read what ``save`` wrote into a model of the same architecture, in place; returns the model.

    Args:
        model: with plain ``nn.Linear`` layers, on any device, meta included (parameters then appear on the CPU).
        folder: with ``config.json`` and safetensors.
        activations: as for ``quantize_weights``; the file's own choice by default.

    Raises:
        ValueError: the folder is no checkpoint of a known scheme, or its tensors do not fit the model.
    """
    folder = Path(folder)
    scheme, kept = _read_scheme(read_json(folder / CONFIG), folder)
    choice = activations or ("16-bit" if scheme.activation is None else "quantized")
    with opened(folder) as files:
        present = {
            name.removesuffix(f".{scheme.scale}")
            for name in files.tensors
            if name.endswith(f".{scheme.scale}")
        }
        layers = {name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        foreign = sorted(present - layers)
        if foreign or not present:
            raise ValueError(
                f"{str(folder)!r} holds {foreign[0] if foreign else 'nothing'!r} quantized, which is no linear layer "
                "of the model: load it into a model of the same architecture"
            )
        quantize_weights(
            model, scheme, activations=choice, only=lambda name, _: name in present and name not in kept
        )
        expected = dict(_named_tensors(model))
        _check(expected, files.tensors, folder)
        _fill(model, scheme, files)
    return model


def _scheme_of(model: nn.Module) -> Scheme:
    found = {m.scheme for m in model.modules() if isinstance(m, QuantizedLinear)}
    if len(found) != 1:
        what = f"layers of {len(found)} schemes" if found else "no quantized layer"
        raise ValueError(
            f"the model has {what}: call octavo.quantize_weights(model, ...) once before saving it"
        )
    return found.pop()


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """State-dict entries by their names in files; tied tensors once."""
    prefixes = {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    seen: set[int] = set()
    for key, value in model.state_dict(keep_vars=True).items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        owner, _, last = key.rpartition(".")
        layer = prefixes.get(owner)
        if layer is not None and last in ("weight_data", "weight_scale"):
            stored = layer.scheme.data if last == "weight_data" else layer.scheme.scale
            yield f"{owner}.{stored}", _stored(value, layer.scheme, last)
        else:
            yield key, value


def _stored(value: Tensor, scheme: Scheme, last: str) -> Tensor:
    if last == "weight_scale":
        return value.view(scheme.stored_scale) if value.dtype != scheme.stored_scale else value
    return value.view(torch.uint8) if scheme.weight.element.packed > 1 else value


def _config_of(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return {}
    content = config.to_dict()
    if "architectures" not in content or not content["architectures"]:
        content["architectures"] = [type(model).__name__]
    return content


def _read_scheme(config: Mapping[str, Any], folder: Path) -> tuple[Scheme, set[str]]:
    entry = config.get("quantization_config")
    if not isinstance(entry, dict):
        raise ValueError(
            f"{str(folder / CONFIG)!r} has no quantization_config: it is no quantized checkpoint"
        )
    for scheme in SCHEMES.values():
        for choice in (scheme, _other_activations(scheme)):
            kept = list(entry.get("ignore", entry.get("modules_to_not_convert")) or [])
            if _same(choice.quantization_config(kept), entry):
                return choice, set(kept)
    kind = entry.get("format") or entry.get("quant_method")
    raise ValueError(f"{str(folder)!r} is quantized as {kind!r}, which is none of {', '.join(SCHEMES)}")


def _other_activations(scheme: Scheme) -> Scheme:
    return replace(scheme, activation=None if scheme.activation else scheme.weight)


def _same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether everything that we would write is there, equal."""
    for key, value in ours.items():
        other = theirs.get(key)
        if isinstance(value, dict):
            if not isinstance(other, dict) or not _same(value, other):
                return False
        elif value != other:
            return False
    extra = set(theirs.get("config_groups", {}).get("group_0", {})) - set(
        ours.get("config_groups", {}).get("group_0", {})
    )
    return "input_activations" not in extra


def _check(expected: Mapping[str, Tensor], found: Mapping[str, Stored], folder: Path) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        lacks = f"lacks {missing[0]!r}" if missing else f"has {extra[0]!r}, which the model lacks"
        more = f" and {len(missing) + len(extra) - 1} more differ" if len(missing) + len(extra) > 1 else ""
        raise ValueError(f"{str(folder)!r} {lacks}{more}: load it into a model of the same architecture")
    for name, tensor in expected.items():
        if tuple(tensor.shape) != found[name].shape:
            raise ValueError(
                f"{name!r} is {found[name].shape} in {str(folder)!r} but {tuple(tensor.shape)} in the model"
            )


def _fill(model: nn.Module, scheme: Scheme, files: TensorFiles) -> None:
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    for name in files.tensors:
        owner, _, last = name.rpartition(".")
        module, value = model.get_submodule(owner), files.read(name)
        if owner in layers and last in (scheme.data, scheme.scale):
            own = "weight_data" if last == scheme.data else "weight_scale"
            target: Tensor = getattr(module, own)
            setattr(module, own, value.view(target.dtype).to(_device(target)))
        else:
            _assign(module, last, value)
    _tie(model)


def _device(like: Tensor) -> torch.device:
    return torch.device("cpu") if like.device.type == "meta" else like.device


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    old: Tensor = getattr(module, name)
    value = value.to(_device(old), None if old.device.type == "meta" else old.dtype)
    if isinstance(old, nn.Parameter):
        if old.device.type == "meta":
            setattr(module, name, nn.Parameter(value, requires_grad=False))
        else:
            old.data.copy_(value)
    else:
        setattr(module, name, value)


def _tie(model: nn.Module) -> None:
    """Weights that a transformers model ties are stored once."""
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()
