"""`octavo run` and `octavo operators`, in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from octavo import operators
from octavo.operators import native, wins

Octavo = Callable[..., tuple[int, str, str]]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text("import sys\nprint(sys.argv[1:], __name__)\nsys.exit(len(sys.argv))\n")
    return path


def test_a_program_keeps_its_own_options_and_its_exit_status(
    octavo: Octavo, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switched = []
    monkeypatch.setattr(
        "octavo.operators.registry.enable", lambda *names, force=False: switched.append((names, force))
    )
    monkeypatch.delenv(operators.ENVIRONMENT, raising=False)
    status, shown, _ = octavo(
        "run", "--operators", "topk,rms_norm", "--force", program, "--force", "-h", "x", "--out=3"
    )
    assert (status, shown) == (5, "['--force', '-h', 'x', '--out=3'] __main__\n")
    octavo("run", program)
    monkeypatch.setenv(operators.ENVIRONMENT, "topk")
    status, _, error = octavo("run", "--report", program)
    assert status == 1
    assert "no operator is taken over: this PyTorch was built without a GPU" in error or "overload" in error
    assert switched == [(("topk", "rms_norm"), True), ((), False), (("topk",), False)]


@pytest.mark.parametrize(
    ("arguments", "environment", "line"),
    [
        (["absent.py"], "", "no script at 'absent.py': give a Python file"),
        (["--operators", "softmax", "{program}"], "", "unknown operator 'softmax'; choose from topk"),
        (["{program}"], "topk,zip", "unknown operator 'zip'; choose from topk"),
        ([], "", "Missing argument 'FILE'"),
    ],
    ids=["absent", "operator", "environment", "nothing"],
)
def test_what_cannot_run_is_one_line(
    octavo: Octavo,
    program: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    environment: str,
    line: str,
) -> None:
    monkeypatch.setenv(operators.ENVIRONMENT, environment)
    status, shown, error = octavo("run", *(word.format(program=program) for word in arguments))
    assert (status, shown) == (2, "")
    assert line in error
    assert error.count("\n") == 1


def test_status_shows_the_router_and_the_owners_table(
    octavo: Octavo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setenv("OCTAVO_WINS", str(tmp_path))
    native._library.cache_clear()
    box = '{"dtype": ["float32"], "m": [1, 9], "n": [1, 9], "k": [1, 2]}'
    (tmp_path / "gfx942.json").write_text(f'{{"run": "by hand", "topk": [{box}]}}')
    wins.reload()
    status, shown, _ = octavo("operators", "status", "--arch", "gfx942")
    assert status == 0
    words = " ".join(shown.split())
    assert "router: Python (octavo operators build)" in words
    assert f"own measurements: {tmp_path}" in words
    assert "topk 1 by hand" in words
    assert "rms_norm_backward 0 not measured" in words
    wins.reload()
    native._library.cache_clear()


def test_build_without_a_compiler_is_one_line(
    octavo: Octavo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "absent")
    status, shown, error = octavo("operators", "build")
    assert (status, shown) == (2, "")
    assert error.startswith("octavo: no C++ compiler found (looked for absent)")
    assert error.count("\n") == 1
