"""Weights of a model from and to safetensors, in Hugging Face's layout where its architecture has one.

Everything is checked by the headers before a weight is changed, so a refused file leaves the model as it was.
Tensors are read and converted one at a time; files are written under temporary names and renamed at the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from octavo.models import hf_deepseek, hf_llama, safetensors_files
from octavo.models.base import Model, ModelConfig
from octavo.models.deepseek import DeepSeekConfig
from octavo.models.hf_llama import Place
from octavo.models.llama3 import Llama3Config
from octavo.models.safetensors_files import FLOATS, INDEX, SINGLE, TensorFiles, Writer


@dataclass(frozen=True)
class Architecture:
    """A model's words in Hugging Face's files: its ``config.json`` and where its weights are stored."""

    config: type
    from_config: Callable[[Mapping[str, Any]], ModelConfig]
    to_config: Callable[[Any], dict[str, Any]]
    places: Callable[[Any], Mapping[str, Place | Sequence[Place]]]
    """A sequence has a place for each slice of the weight's first dimension."""
    copies: Callable[[Any], dict[str, str]] = lambda config: {}
    """Names of tensors that some files hold a second time, and of what they are a copy of."""
    fits: Callable[[Any], bool] = lambda config: True
    """Whether this architecture has what a configuration of this type asks for."""
    ignored: Callable[[Any, Collection[str]], Collection[str]] = lambda config, names: ()
    """Which of the names in a file belong to what is not part of the model here."""


ARCHITECTURES: dict[str, Architecture] = {
    hf_llama.ARCHITECTURE: Architecture(
        Llama3Config, hf_llama.from_config, hf_llama.to_config, hf_llama.places, hf_llama.copies
    ),
    **{
        name: Architecture(
            DeepSeekConfig,
            layout.from_config,
            layout.to_config,
            hf_deepseek.places,
            fits=layout.fits,
            ignored=hf_deepseek.multi_token_prediction,
        )
        for name, layout in hf_deepseek.LAYOUTS.items()
    },
}
"""By the name in ``config.json``. A model without a line here keeps its own names in the files."""

SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
# Old Llama files hold the rotary frequencies, which follow from config.json.
IGNORED_ENDINGS = (".rotary_emb.inv_freq",)


def load_safetensors(model: nn.Module, path: Path | str) -> None:
    """Sets every weight of ``model`` from ``path``, in the dtype and on the device that each weight has.

    Args:
        model: a model of this package, converted or not; its weights are read by Hugging Face's names. Any
            other module is read by the names of its own state dict.
        path: a ``.safetensors`` file, a ``model.safetensors.index.json``, or a folder with
            ``model.safetensors`` or an index and its shards.

    Raises:
        ValueError: the files are missing or damaged, lack a weight or hold another tensor, or a tensor has
            another shape or is stored in another type than 16, 32 or 64 bit floats. No weight was changed.
    """
    model = _plain(model)
    weights = _weights(model)
    with safetensors_files.opened(Path(path)) as files:
        _check(files, weights, model, repr(str(path)))
        with torch.no_grad():
            for weight, place in weights:
                value = files.read(place.name)
                if place.rotary_heads:
                    value = hf_llama.rows_from_hugging_face(value, place.rotary_heads)
                weight.copy_(value)


def save_safetensors(
    model: nn.Module,
    path: Path | str,
    *,
    max_shard_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    extra_config: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Writes the weights of ``model`` to ``path``; returns the files.

    Args:
        model: as for ``load_safetensors``.
        path: a name that ends in ``.safetensors`` is one file; any other is a folder, in which
            ``model.safetensors`` is written or, for weights of more than ``max_shard_bytes``, shards and their
            index, and ``config.json`` for a model that transformers has too. Other files in it stay.
        max_shard_bytes: largest file; a shard is copied to the CPU's memory while it is written.
        dtype: what to store the weights in, None as they are.
        extra_config: more entries of ``config.json``, such as ``{"eos_token_id": 2}``.

    A crash or an error before the last moment leaves what was at ``path`` as it was; in that moment files are
    renamed, and a set of several shards written over another of as many is without its index until all are.

    Raises:
        OSError: a file cannot be written, as when the disk is full.
        ValueError: ``max_shard_bytes`` is not positive.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}: give a number of at least 1")
    model = _plain(model)
    path = Path(path)
    single = path.suffix == ".safetensors"
    weights = {place.name: (weight, place) for weight, place in _weights(model)}
    sizes = {name: w.numel() * _stored_dtype(w, p, dtype).itemsize for name, (w, p) in weights.items()}
    groups = safetensors_files.shards(sizes, sum(sizes.values()) if single else max_shard_bytes)
    names = [path.name if single else SINGLE]
    if len(groups) > 1:
        names = [f"model-{n + 1:05}-of-{len(groups):05}.safetensors" for n in range(len(groups))]
    with Writer(path.parent if single else path) as writer:
        if not single:
            _write_config(writer, model, weights, dtype, extra_config or {})
        for file, group in zip(names, groups, strict=True):
            writer.tensors(file, {name: _stored_value(*weights[name], dtype) for name in group})
        if single:
            return writer.commit()
        before = _shards_before(path)
        if len(groups) > 1:
            places = {name: file for file, group in zip(names, groups, strict=True) for name in group}
            writer.json(INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places})
            same = [INDEX] if before & set(names) else []
            return writer.commit(first=same, last=[SINGLE, *(before - set(names))])
        return writer.commit(last=[INDEX, *before])


def from_pretrained(
    path: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Model:
    """The model in a folder in Hugging Face's layout: ``config.json`` and safetensors.

    Args:
        path: the folder. Nothing is downloaded.
        device: where its weights are to be.
        dtype: their type; None means what ``config.json`` says, float32 where it says nothing.

    Raises:
        ValueError: ``config.json`` is missing or damaged or is of a model that is not here, or as
            ``load_safetensors``.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{str(path)!r} is no folder: download the model and give the folder it is in")
    content = safetensors_files.read_json(folder / "config.json")
    config = _architecture(content).from_config(content)
    model = config.build("meta", dtype or _config_dtype(content))
    model = model.to_empty(device=device)
    model.tie_weights()
    load_safetensors(model, folder)
    return model


def _plain(model: nn.Module) -> nn.Module:
    """The model inside what ``torch.compile`` and data parallelism put around it."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return getattr(model, "_orig_mod", model)


def _of(model: nn.Module) -> Architecture | None:
    config = getattr(model, "config", None)
    return next((a for a in ARCHITECTURES.values() if type(config) is a.config and a.fits(config)), None)


def _weights(model: nn.Module) -> list[tuple[Tensor, Place]]:
    """Every weight once, and where it is stored; slices of one that is stored in parts."""
    architecture = _of(model)
    state = model.state_dict(keep_vars=True)
    if architecture is None:
        once = {id(value): (value, Place(name)) for name, value in reversed(state.items())}
        return [pair for pair in reversed(once.values()) if isinstance(pair[0], Tensor)]
    places = architecture.places(model.config)
    lacking = [name for name in places if name not in state]
    if lacking:
        raise ValueError(f"the model has no weight {lacking[0]!r}, which its config asks for")
    found: list[tuple[Tensor, Place]] = []
    for name, place in places.items():
        if isinstance(place, Place):
            found.append((state[name], place))
        else:
            found += zip(state[name].detach().unbind(), place, strict=True)
    return found


def _check(files: TensorFiles, weights: list[tuple[Tensor, Place]], model: nn.Module, where: str) -> None:
    """Raises ValueError at the first thing in ``files`` that is not the model's."""
    architecture = _of(model)
    copies = {} if architecture is None else architecture.copies(model.config)
    ignored = () if architecture is None else architecture.ignored(model.config, files.tensors.keys())
    for weight, place in weights:
        found = files.tensors.get(place.name)
        if found is None:
            raise ValueError(
                f"{where} has no tensor {place.name!r}, which the model needs{_hint(place.name)}"
            )
        if found.shape != tuple(weight.shape):
            raise ValueError(
                f"{where} has {place.name!r} of shape {list(found.shape)}, but the model needs "
                f"{list(weight.shape)}: its dimensions are others"
            )
        if weight.is_floating_point() != (found.dtype in FLOATS):
            raise ValueError(
                f"{where} has {place.name!r} stored as {found.dtype}, but the model needs one of "
                f"{', '.join(FLOATS)}: quantized weights cannot be read"
            )
    known = {place.name for _, place in weights} | set(copies) | set(ignored)
    extra = [n for n in files.tensors if n not in known and not n.endswith(IGNORED_ENDINGS)]
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ValueError(
            f"{where} has tensor {extra[0]!r}{more}, which the model has not: it is another model"
        )
    for copy, original in copies.items():
        if copy in files.tensors and not torch.equal(files.read(copy), files.read(original)):
            raise ValueError(
                f"{where} has {copy!r} with other values than {original!r}, but the model ties the two: "
                f"set tie_word_embeddings to false"
            )


def _hint(name: str) -> str:
    return ": its output head is not tied to the embedding" if name == "lm_head.weight" else ""


def _stored_dtype(weight: Tensor, place: Place, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None or place.keeps_dtype or not weight.is_floating_point():
        return weight.dtype
    return dtype


def _stored_value(weight: Tensor, place: Place, dtype: torch.dtype | None) -> Tensor:
    value = weight.detach()
    if place.rotary_heads:
        value = hf_llama.rows_to_hugging_face(value, place.rotary_heads)
    return value.to(device="cpu", dtype=_stored_dtype(weight, place, dtype)).contiguous()


def _write_config(
    writer: Writer,
    model: nn.Module,
    weights: Mapping[str, tuple[Tensor, Place]],
    dtype: torch.dtype | None,
    extra: Mapping[str, Any],
) -> None:
    architecture = _of(model)
    if architecture is None:
        return
    stored = _stored_dtype(*next(iter(weights.values())), dtype)
    content = architecture.to_config(model.config) | {"torch_dtype": str(stored).removeprefix("torch.")}
    writer.json("config.json", content | dict(extra))


def _shards_before(folder: Path) -> set[str]:
    """Shards that an index in ``folder`` lists, by the names that are given here and by Hugging Face."""
    try:
        listed = safetensors_files.read_json(folder / INDEX).get("weight_map")
    except ValueError:
        return set()
    files = listed.values() if isinstance(listed, dict) else ()
    return {file for file in files if isinstance(file, str) and SHARD.fullmatch(file)}


def _architecture(content: Mapping[str, Any]) -> Architecture:
    named = content.get("architectures")
    name = named[0] if isinstance(named, list) and named else content.get("model_type")
    if name not in ARCHITECTURES:
        raise ValueError(
            f"config.json is of a {name!r}, which is not here: give a model of {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def _config_dtype(content: Mapping[str, Any]) -> torch.dtype:
    name = content.get("dtype") or content.get("torch_dtype") or "float32"
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or found not in FLOATS.values():
        raise ValueError(f"config.json names the dtype {name!r}: give one with the argument dtype")
    return found
