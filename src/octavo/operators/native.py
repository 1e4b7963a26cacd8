"""The compiled router (``router.cpp``): building it, finding it, and driving it.

``octavo operators build`` compiles it once for each minor version and ABI of PyTorch, into the user's cache folder
($OCTAVO_CACHE, $XDG_CACHE_HOME/octavo or ~/.cache/octavo). ``enable`` uses it where it is there; without it, or with
``$OCTAVO_ROUTER=python``, calls are routed in Python, with the same results.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from octavo.operators import wins
from octavo.operators.override import Override

SOURCE = Path(__file__).with_name("router.cpp")
ENVIRONMENT = "OCTAVO_ROUTER"
"""``python``: do not use the compiled router, built or not."""

_WITHOUT_BOUND = 2**62
_SCALAR_TYPES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}
"""c10::ScalarType of the dtypes that kernels are written for."""


class BuildError(RuntimeError):
    """Why the router could not be compiled or loaded, in one line."""


def cache_folder() -> Path:
    """Where built routers are kept."""
    own = os.environ.get("OCTAVO_CACHE")
    if own:
        return Path(own) / "router"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo" / "router"


def _version() -> str:
    return ".".join(torch.__version__.split("+")[0].split(".")[:2])


def library_path() -> Path:
    """The built router for this PyTorch, present or not: its name has version, ABI and a hash of the source."""
    abi = int(torch.compiled_with_cxx11_abi())
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    return cache_folder() / f"torch{_version()}-cxx11abi{abi}-{digest}.so"


def compiler() -> str | None:
    """$CXX if set, else the first C++ compiler on the path."""
    named = os.environ.get("CXX")
    candidates = [named] if named else ["c++", "g++", "clang++"]
    return next((found for name in candidates if (found := shutil.which(name))), None)


def build() -> Path:
    """Compile the router for this PyTorch, replacing an earlier build; returns its path.

    Raises:
        BuildError: without a compiler, if it fails, or if what it built cannot be loaded.
    """
    from torch.utils import cpp_extension

    path, found = library_path(), compiler()
    if found is None:
        looked_for = os.environ.get("CXX") or "c++, g++, clang++"
        raise BuildError(
            f"no C++ compiler found (looked for {looked_for}): install one or set CXX to its path"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    abi = int(torch.compiled_with_cxx11_abi())
    includes = [word for folder in cpp_extension.include_paths() for word in ("-isystem", folder)]
    libraries = [f"-L{folder}" for folder in cpp_extension.library_paths()]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / "router.so"
        command = [
            *(found, "-O2", "-std=c++20", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
            *(*includes, str(SOURCE), "-o", str(built), *libraries, "-ltorch_cpu", "-lc10"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            reason = next((line for line in lines if "error" in line), lines[-1] if lines else "no output")
            raise BuildError(f"{found} could not compile {SOURCE.name} for PyTorch {_version()}: {reason}")
        _open(built)
        # In one step, so that another process finds the old build, the new one or none.
        built.replace(path)
    _library.cache_clear()
    return path


def _open(path: Path) -> ctypes.CDLL:
    try:
        # PyDLL keeps Python's lock: registering kernels beside running Python threads is not safe otherwise.
        library = ctypes.PyDLL(str(path))
        library.octavo_error.restype = ctypes.c_char_p
        library.octavo_route.restype = ctypes.c_void_p
        library.octavo_refused.restype = ctypes.c_int64
    except (OSError, AttributeError) as error:
        raise BuildError(f"the built router {path} cannot be loaded: {error}") from None
    return library


@functools.cache
def _library() -> ctypes.CDLL | None:
    path = library_path()
    if path.is_file():
        try:
            return _open(path)
        except BuildError as error:
            warnings.warn(f"{error}; calls are routed in Python (octavo operators build)", stacklevel=2)
            return None
    others = sorted(other.name for other in path.parent.glob("torch*.so"))
    if others:
        warnings.warn(
            f"the compiled router was built for another version ({others[-1]}) and this is PyTorch "
            f"{_version()}; calls are routed in Python: run octavo operators build",
            stacklevel=2,
        )
    return None


def load() -> ctypes.CDLL | None:
    """The built router, or None where there is none or ``$OCTAVO_ROUTER`` is ``python``.

    Warns, once, of a build that cannot be used.
    """
    return None if os.environ.get(ENVIRONMENT) == "python" else _library()


class _Box(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("dtype", "m0", "m1", "n0", "n1", "k0", "k1")]


class _Filter(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64) for name in ("tensor", "columns", "k", "dtypes", "max_columns", "max_k")
    ]


def _box(box: dict[str, list[Any]], dtype: torch.dtype) -> _Box:
    k = box.get("k", [0, _WITHOUT_BOUND])
    return _Box(_SCALAR_TYPES[dtype], *box["m"], *box["n"], *k)


_definitions: dict[str, torch.library.Library] = {}


def _define(name: str) -> int:
    """Define ``octavo_router::<name>`` with the schema of ``aten::<name>``, once; the number of its results."""
    base, _, overload = name.partition(".")
    schema = getattr(getattr(torch.ops.aten, base), overload or "default")._schema
    if name not in _definitions:
        _definitions[name] = torch.library.Library("octavo_router", "FRAGMENT")
        _definitions[name].define(str(schema).removeprefix("aten::"))
    return len(schema.returns)


class NativeRoute:
    """One overload at one dispatch key, routed by the compiled router.

    Args:
        library: what ``load`` returned.
        override: the overload, with its ``filter``.
        key: the dispatch key.
        python: asked with (keyset, *arguments) about every call that the filter lets through; it serves the call,
            or calls ``refuse`` and returns any tensors.
    """

    def __init__(
        self, library: ctypes.CDLL, override: Override, key: str, python: Callable[..., Any]
    ) -> None:
        assert override.filter is not None
        self._library, self._filter = library, override.filter
        name = override.overload.removeprefix("aten::")
        base, _, overload = name.partition(".")
        self.returns = _define(name)
        self._operator = torch.library.Library("octavo_router", "IMPL")
        self._operator.impl(name, python, key, with_keyset=True)
        route = library.octavo_route(base.encode(), overload.encode(), key.encode(), self._filter_of())
        if not route:
            raise BuildError(f"the compiled router: {library.octavo_error().decode()}")
        self._route = ctypes.c_void_p(route)
        self._known: set[torch.device] = set()
        self._unmeasured: list[str] = []

    def _filter_of(self) -> Any:
        f = self._filter
        dtypes = sum(1 << _SCALAR_TYPES[dtype] for dtype in f.dtypes)
        k = -1 if f.k is None else f.k
        return ctypes.byref(_Filter(f.tensor, f.columns, k, dtypes, f.max_columns, f.max_k))

    def refuse(self) -> None:
        """In ``python``: this call is for PyTorch's kernel, and what is returned is not used."""
        self._library.octavo_refuse()

    def switch(self, enabled: bool, forced: bool) -> None:
        """Whether calls are considered, and whether also those without a measurement. Takes effect at once."""
        self._library.octavo_switch(self._route, int(enabled), int(forced))

    def learn(self, device: torch.device) -> None:
        """Hand over the measured wins of a device, once, so that the filter refuses the rest itself."""
        if device in self._known:
            return
        self._known.add(device)
        from octavo import hardware

        architecture = hardware.architecture(device)
        table = wins.tables(architecture).get(self._filter.operator)
        if table is None and architecture not in self._unmeasured:
            self._unmeasured.append(architecture)
        found = [] if table is None else table.boxes
        boxes = [_box(box, d) for box in found for d in self._filter.dtypes if str(d)[6:] in box["dtype"]]
        array = (_Box * max(1, len(boxes)))(*boxes)
        index = -1 if device.type == "cpu" else device.index or 0
        count = ctypes.c_int64(len(boxes))
        self._library.octavo_table(self._route, index, int(table is not None), array, count)

    def forget(self) -> None:
        """Ask Python again about every device: the tables of wins were read anew."""
        for device in self._known:
            index = -1 if device.type == "cpu" else device.index or 0
            self._library.octavo_table(self._route, index, 0, None, ctypes.c_int64(0))
        self._known.clear()

    def refused(self) -> dict[str, int]:
        """Calls that the filter sent to PyTorch's kernel, by the reasons that the Python router would give."""
        reasons = (  # in the order of the enumeration in router.cpp
            self._filter.other_dtype,
            self._filter.too_long,
            self._filter.k_too_large,
            wins.OTHER_DIMENSION,
            f"not measured on {', '.join(self._unmeasured)}",
            wins.NOT_A_WIN,
        )
        counts = [self._library.octavo_refused(self._route, i) for i in range(len(reasons))]
        return {reason: n for reason, n in zip(reasons, counts) if n}

    def reset(self) -> None:
        """Start those counts again."""
        self._library.octavo_reset(self._route)
