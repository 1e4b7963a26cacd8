"""The compiled router: built here where there is a compiler, then put through the checks of the Python one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.operators import native

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder that holds a router for this PyTorch."""
    if native.compiler() is None:
        pytest.skip("no C++ compiler on this machine")
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE", str(folder))
        path = native.build()
    native._library.cache_clear()
    assert [path] == list((folder / "router").iterdir())
    return folder


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=300)


@pytest.mark.parametrize("checks", ["opinfo,errors,out,threads,reasons,filter", "stale"])
def test_on_cpu(built: Path, checks: str) -> None:
    done = _python(str(HERE / "cpu_registry.py"), checks, "c++", OCTAVO_CACHE=str(built))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [word for check in checks.split(",") for word in ("passed", check)]
    if checks != "stale":  # which overrides the kernel once more itself
        assert "verriding" not in done.stderr


def test_it_can_be_turned_down(built: Path) -> None:
    done = _python(
        str(HERE / "cpu_registry.py"), "reasons", "python", OCTAVO_CACHE=str(built), OCTAVO_ROUTER="python"
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("compiler", "line"),
    [
        (None, "no C++ compiler found (looked for absent): install one or set CXX to its path"),
        ("#!/bin/sh\necho 'router.cpp:1: error: no such header' >&2; exit 1", "error: no such header"),
        ("#!/bin/sh\nexit 1", "no output"),
    ],
    ids=["absent", "complains", "silent"],
)
def test_what_cannot_be_built_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None, line: str
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "absent")
    if compiler is not None:
        (tmp_path / "cxx").write_text(compiler)
        (tmp_path / "cxx").chmod(0o755)
        monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
    with pytest.raises(native.BuildError) as caught:
        native.build()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not native.library_path().exists()


def test_a_build_that_cannot_be_used_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    native._library.cache_clear()
    assert native.load() is None
    native._library.cache_clear()
    other = tmp_path / "router" / "torch2.0-cxx11abi1-0123456789ab.so"
    other.parent.mkdir()
    other.write_bytes(b"")
    with pytest.warns(UserWarning, match=r"built for another version \(torch2.0.*run octavo operators build"):
        assert native.load() is None
    native._library.cache_clear()
    native.library_path().write_bytes(b"no library")
    with pytest.warns(UserWarning, match="cannot be loaded: .*calls are routed in Python"):
        assert native.load() is None
    assert native.load() is None
    native._library.cache_clear()
