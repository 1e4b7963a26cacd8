"""The registry: what is taken and what goes to PyTorch. Each check runs in a process of its own, since what it
registers under the CPU key stays for good."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo import operators
from octavo.operators import wins

HERE = Path(__file__).parent


def _run(arguments: list[str], **environment: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


CHECKS = "opinfo,errors,out,threads,reasons,filter"


@pytest.mark.parametrize("checks", [CHECKS, "stale"])
def test_on_cpu(checks: str) -> None:
    passed = _run([str(HERE / "cpu_registry.py"), checks, "python"], OCTAVO_ROUTER="python")
    assert passed.split() == [word for check in checks.split(",") for word in ("passed", check)]


CASES = "specials,ties,gradients,autocast,opinfo_out_and_errors"


@pytest.mark.case("B36")
@pytest.mark.case("B39")
@pytest.mark.case("B44")
@pytest.mark.case("B45")
def test_known_situations_on_cpu() -> None:
    passed = _run([str(HERE / "cpu_registry.py"), CASES], OCTAVO_ROUTER="python", PYTHONWARNINGS="ignore")
    assert passed.split() == [word for check in CASES.split(",") for word in ("passed", check)]


def test_transformers_models_run_unchanged() -> None:
    pytest.importorskip("transformers", reason="runs small Llama and Mixtral models")
    passed = _run([str(HERE / "cpu_registry.py"), "transformers_models"], OCTAVO_ROUTER="python")
    assert "passed transformers_models" in passed


@pytest.mark.case("B39")
def test_recomputed_router_chooses_the_same_experts() -> None:
    assert "passed recompute" in _run([str(HERE / "cpu_registry.py"), "recompute"], OCTAVO_ROUTER="python")


def test_nothing_is_registered_on_the_cpu_key() -> None:
    code = (
        "import torch, octavo.operators as o\n"
        "before = torch._C._dispatch_dump('aten::topk'), torch._C._dispatch_dump('aten::_fused_rms_norm')\n"
        "o.enable(force=True)\n"
        "x = torch.randn(3, 5)\n"
        "torch.topk(x, 2); torch.nn.functional.rms_norm(x, (5,))\n"
        "line = [l for l in torch._C._dispatch_dump('aten::topk').splitlines() if l.startswith('CPU')]\n"
        "assert all('octavo' not in l for l in line), line\n"
        "assert torch._C._dispatch_dump('aten::_fused_rms_norm') == before[1] or torch.version.cuda\n"
        "import sys; assert 'triton' not in sys.modules\n"
        "print('clean')\n"
    )
    assert "clean" in _run(["-c", code])


def test_unknown_operator_is_named() -> None:
    with pytest.raises(ValueError, match="unknown operator 'softmax'; choose from topk, rms_norm"):
        operators.enable("softmax")


def test_run_script(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import sys\nfrom octavo import operators\n"
        "print(sys.argv[1:], __name__, [s.overload for s in operators.status() if s.enabled])\n"
    )
    printed = _run(["-m", "octavo", "run", str(script), "a", "--b"], OCTAVO_OPERATORS="topk")
    assert printed.startswith("['a', '--b'] __main__")
    with pytest.raises(FileNotFoundError, match="no script at"):
        operators.run_script(str(tmp_path / "absent.py"))


def test_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(operators.ENVIRONMENT, "topk, nonsense")
    with pytest.raises(ValueError, match="unknown operator 'nonsense'"):
        operators.enable_from_environment()
    monkeypatch.setenv(operators.ENVIRONMENT, "0")
    assert operators.enable_from_environment() == ()


def test_wins_boxes_and_overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gfx942.json").write_text(
        '{"run": "here", "topk": [{"dtype": ["float32"], "m": [256, 1024], "n": [64, 128], "k": [1, 8]}]}'
    )
    monkeypatch.setenv("OCTAVO_WINS", str(tmp_path))
    wins.reload()
    from octavo import hardware

    device = torch.device("cuda", 0)
    shape = {"dtype": "float32", "m": 256, "n": 128, "k": 8}
    with hardware.assume_architecture("gfx942"):
        assert wins.why_not("topk", device, **shape) is None
        for name, value in (("dtype", "bfloat16"), ("m", 255), ("n", 129), ("k", 9)):
            reason = wins.why_not("topk", device, **{**shape, name: value})
            assert reason == "not measured faster for this shape"
        assert wins.why_not("rms_norm", device, dtype="float32", m=1, n=1) == "not measured on gfx942"
        assert "here" in wins.tables("gfx942")["topk"].run
        assert str(tmp_path) in wins.tables("gfx942")["topk"].run
    wins.reload()


def test_no_table_is_committed_for_amd() -> None:
    folder = Path(wins.__file__).with_name("wins_tables")
    assert not list(folder.glob("gfx*.json"))
