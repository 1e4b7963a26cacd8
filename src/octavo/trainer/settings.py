"""Options by name, from the command line and from a file, made into a ``TrainConfig``.

A file is TOML, JSON, or the ``report.json`` of an earlier run. Its keys are the options' names, with hyphens or
underscores: ``seq-len = 128``. What the command line gives wins.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import typing
from pathlib import Path
from typing import Any

import torch

from octavo.errors import UserError
from octavo.trainer.config import TrainConfig

DEFAULT_RECIPES = ("rowwise",)
NAMES = str | list[str]

OPTIONS: dict[str, Any] = typing.get_type_hints(TrainConfig) | {"recipe": NAMES, "compare": NAMES}
"""What a file may hold: the fields of ``TrainConfig``, with two lists in the place of recipes and baseline."""
del OPTIONS["recipes"], OPTIONS["baseline"]

KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text in quotes"),
    Path: ((str,), "a path in quotes"),
    NAMES: ((str, list), "a name or a list of names"),
}


def read(path: Path) -> dict[str, Any]:
    """The options in the file ``path``, checked by name and type.

    Raises:
        UserError: it cannot be read, is neither TOML nor JSON, or holds a key or a value that does not fit.
    """
    content = _parse(path)
    if isinstance(content, dict) and content.get("report") == "octavo train":
        content = content.get("config")
    if not isinstance(content, dict):
        raise UserError(f"{str(path)!r} holds no options: give them as TOML or JSON, such as seq_len = 128")
    options: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in OPTIONS:
            close = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(OPTIONS)}"
            raise UserError(f"{str(path)!r} has the unknown option {key!r}: {hint}")
        if value is not None:  # null in JSON: the default
            options[name] = _checked(path, key, value, OPTIONS[name])
    return options


def _parse(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot read --config {str(path)!r} ({error.strerror or error}): give a TOML or JSON file"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"--config {str(path)!r} is no text: give a TOML or JSON file") from None
    is_json = path.suffix == ".json"
    try:
        return json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if is_json else "TOML"
        raise UserError(f"{str(path)!r} is not {kind}: {error}") from None


def _checked(path: Path, key: str, value: Any, hint: Any) -> Any:
    """``value`` as ``hint`` wants it."""
    wanted: Any = (
        hint if hint == NAMES else next((t for t in typing.get_args(hint) if t is not type(None)), hint)
    )
    kinds, words = KINDS[wanted]
    fits = isinstance(value, kinds) and (wanted is bool or not isinstance(value, bool))
    if isinstance(value, list):
        fits = fits and all(isinstance(name, str) for name in value)
    if not fits:
        raise UserError(f"{str(path)!r} has {key} = {value!r}: it must be {words}")
    return wanted(typing.cast(Any, value)) if wanted in (float, Path) else value


def names(values: str | list[str] | None) -> list[str]:
    """Names from one text or several, each of which may hold more than one, separated by commas."""
    texts = [values] if isinstance(values, str) else values or []
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def resolve(given: dict[str, Any], file: Path | None = None) -> TrainConfig:
    """The job that ``given`` asks for, over the options in ``file``, over the defaults.

    Args:
        given: options by name, those that are None were not given.

    Raises:
        UserError: as ``read``. The configuration itself is not checked.
    """
    options = read(file) if file else {}
    options |= {name: value for name, value in given.items() if value is not None}
    compared = names(options.pop("compare", None))
    recipes = names(options.pop("recipe", None)) or [*DEFAULT_RECIPES]
    device = options.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
    options.setdefault("dtype", "float32" if device == "cpu" else "bfloat16")
    return TrainConfig(recipes=(*compared, *recipes), baseline=compared[0] if compared else None, **options)
