"""FlyDSL is optional: absent, too old, too new or broken, it is one line, and other kernels serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ASK = """
import octavo.info
import json, sys, torch, octavo
from octavo import dispatch, hardware
quiet = sys.modules.get("flydsl") is None
q = octavo.quantize(torch.ones(3, 64), octavo.MXFP8)
product = octavo.scaled_mm(q, q).tolist()
y, rstd = dispatch.run("rms_norm", torch.ones(2, 8), [8], None, 0.0)
print(json.dumps({"quiet": quiet, "why": hardware.why_no_flydsl(), "again": hardware.why_no_flydsl(),
    "served": product == [[64.0] * 3] * 3 and y.tolist() == [[1.0] * 8] * 2,
    "explained": {v.kernel: v.reason for v in octavo.info.explain("rms_norm", [(4, 8)], arch="gfx950")},
    "info": octavo.info.info()["providers"]["flydsl"]}))
"""
BODIES = {
    "": "",
    "raise": "raise RuntimeError('libamdhip64.so.7:\\n  cannot open shared object file')",
    "syntax": "def broken(:",
    "part": "",
}


def pretend(folder: Path, version: str | None, body: str) -> dict[str, object]:
    """What Octavo says in a process where FlyDSL is what `folder` is made to hold; None for none at all."""
    code = ASK
    if version is None:
        code = "import sys; sys.modules['flydsl'] = None\n" + code
    else:
        package, notes = folder / "flydsl", folder / f"flydsl-{version}.dist-info"
        package.mkdir()
        notes.mkdir()
        (package / "__init__.py").write_text(BODIES[body])
        (notes / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flydsl\nVersion: {version}\n")
        code = f"import sys; sys.path.insert(0, {str(folder)!r})\n" + code
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("version", "body", "told"),
    [
        (None, "", "is not installed"),
        ("0.3.1", "raise", "0.3.1 is older than 0.4"),
        ("0.2.0.dev626", "", "is older than 0.4"),
        ("unknown", "", "is older than 0.4"),
        ("0.6.0", "raise", "0.6.0 is newer than 0.5"),
        ("1.0", "", "newer than 0.5"),
        (
            "0.5.0",
            "raise",
            "does not import (RuntimeError: libamdhip64.so.7: cannot open shared object file)",
        ),
        ("0.5.0", "syntax", "does not import (SyntaxError: "),
        ("0.4.2", "part", "does not import (ModuleNotFoundError: No module named 'flydsl.compiler')"),
    ],
)
def test_what_cannot_be_used_is_one_line(version: str | None, body: str, told: str, tmp_path: Path) -> None:
    answer = pretend(tmp_path, version, body)
    why = answer["why"]
    assert isinstance(why, str)
    assert told in why
    assert "octavo[flydsl]" in why
    assert "\n" not in why
    assert answer["again"] == why
    assert answer["quiet"]
    assert answer["served"]
    assert answer["explained"]["flydsl"] == why  # type: ignore[index]
    assert answer["info"] == why


def test_an_architecture_without_flydsl_kernels_is_told_first() -> None:
    import torch

    from octavo import hardware

    with hardware.assume_architecture("gfx942"):
        reason = hardware.why_no_flydsl_on(torch.device("cuda"))
    assert reason == "FlyDSL kernels are written for gfx950, not for gfx942"


@pytest.mark.parametrize("arguments", [["info"], ["explain", "rms_norm", "4x8", "--arch", "gfx950"]], ids=str)
def test_the_command_line_shows_the_reason_whole(arguments: list[str]) -> None:
    """The extra's brackets are no markup."""
    code = "import sys; sys.modules['flydsl'] = None\nfrom octavo.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "flydsl is not installed (pip install 'octavo[flydsl]')" in done.stdout
