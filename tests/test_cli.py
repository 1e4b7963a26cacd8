"""The command `octavo`: what it accepts, and one line with exit status 2 for what it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo import cli, models
from octavo._version import __version__

Octavo = Callable[..., tuple[int, str, str]]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return path


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--recipe", "fp4"], "unknown recipe 'fp4': choose from"),
        (["--compare", "bf16,fp4"], "unknown recipe 'fp4': choose from"),
        (["--recipe", "bf16", "--compare", "bf16"], "recipe 'bf16' is given more than once"),
        (["--model", "llama4"], "unknown model 'llama4': choose one of llama3-debug"),
        (["--data", "{tmp}/nothing"], "does not exist: give a text file, JSONL or a folder"),
        (["--data", "{tmp}/empty.txt"], "holds no text: give a text file"),
        (["--data", "{tmp}/empty"], "holds no text: give a text file"),
        (["--data", "{tmp}/short.txt"], "has 20 bytes but --seq-len 128 needs at least 258"),
        (["--seq-len", "4096"], "--seq-len is 4096 but llama3-debug takes at most 2048"),
        (["--out", "{tmp}/short.txt"], "give another folder with --out"),
        (["--out", "{tmp}/short.txt/x"], "give another folder with --out"),
        (["--steps", "0"], "--steps is 0: give a number of at least 1"),
        (["--steps", "many"], "Invalid value for '--steps': 'many' is not a whole number"),
        (["--batch-size", "-1"], "--batch-size is -1: give"),
        (["--lr", "nan"], "--lr is nan: give a finite number"),
        (["--dtype", "int8"], "--dtype is 'int8': choose one of float32, bfloat16"),
        (["--device", "abacus"], "--device is 'abacus': give cpu"),
        (["--stepps", "3"], "No such option"),
        (["extra"], "unexpected extra argument"),
        (["--lr", "fast"], "Invalid value for '--lr': 'fast' is not a number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(octavo: Octavo, tmp_path: Path, arguments: list[str], line: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("twenty bytes, no mor")
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    status, shown, error = octavo("train", *out, *(a.format(tmp=tmp_path) for a in arguments))
    assert status == 2
    assert shown == ""  # nothing had started
    assert error.startswith("octavo: ")
    assert line in error
    assert error.count("\n") == 1


def test_a_gpu_that_is_not_there_is_one_line(
    octavo: Octavo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    status, _, error = octavo("train", "--device", "cuda", "--out", tmp_path)
    assert status == 2
    assert error == "octavo: --device is 'cuda' but PyTorch sees no GPU here: use --device cpu\n"


def test_an_unknown_command_is_one_line(octavo: Octavo) -> None:
    status, _, error = octavo("trian")
    assert status == 2
    assert error.count("\n") == 1
    assert "No such command 'trian'" in error


def test_train_compares_and_says_where_the_files_are(octavo: Octavo, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = [
        "--steps",
        2,
        "--seq-len",
        32,
        "--batch-size",
        2,
        "--data",
        text,
        "--out",
        out,
        "--device",
        "cpu",
    ]
    status, shown, error = octavo("train", "--recipe", "rowwise", "--compare", "bf16", *options)
    assert (status, error) == (0, "")
    content = json.loads((out / "report.json").read_text())
    assert [run["recipe"] for run in content["runs"]] == ["bf16", "rowwise"]
    assert content["baseline"] == "bf16"
    assert content["config"]["dtype"] == "float32"
    assert str(out / "loss.png") in shown


def test_names_may_be_repeated_or_joined_by_commas() -> None:
    from octavo.trainer.settings import names

    assert names(["bf16, rowwise", "mxfp8"]) == ["bf16", "rowwise", "mxfp8"]
    assert names("bf16,rowwise") == ["bf16", "rowwise"]
    assert names(None) == []


def test_help_names_every_model_and_recipe(octavo: Octavo) -> None:
    from octavo.trainer.config import recipe_names

    status, shown, _ = octavo("train", "--help")
    assert status == 0
    for name in [*models.names(), *recipe_names()]:
        assert name in shown


def test_version_and_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "octavo", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"octavo {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_every_command(octavo: Octavo, arguments: list[str]) -> None:
    _, shown, error = octavo(*arguments)
    for command in ("train", "info", "explain", *cli.ELSEWHERE):
        assert f" {command} " in shown + error


@pytest.mark.parametrize("command", cli.ELSEWHERE)
def test_a_command_of_another_package_is_found(octavo: Octavo, command: str) -> None:
    status, shown, _ = octavo(command, "--help")
    assert status == 0
    assert f"octavo {command} [OPTIONS]" in shown


def test_the_command_line_itself_loads_neither_the_trainer_nor_matplotlib() -> None:
    code = "import sys, octavo.cli; print([m for m in ('octavo.trainer', 'matplotlib') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_info_names_devices_versions_and_every_kernel(octavo: Octavo) -> None:
    status, shown, _ = octavo("info", "--json")
    content = json.loads(shown)
    assert status == 0
    assert content["versions"]["torch"] == torch.__version__
    assert content["kernels"]["cpu"]["scaled_mm"][-1]["kernel"] == "reference"
    status, table, _ = octavo("info")
    assert status == 0
    for word in (
        "e4m3fnuz",
        "rowwise_with_gw_hp",
        "scaled_grouped_mm",
        "kernels on cpu",
        "yes, chosen",
    ):
        assert word in table


def test_explain_says_which_kernel_serves_and_why_not_the_others(octavo: Octavo) -> None:
    status, shown, _ = octavo(
        "explain", "scaled_mm", "17x64", "96x64", "--device", "cpu", "--recipe", "blockwise"
    )
    assert status == 0
    verdicts = {line.split()[0]: line for line in shown.splitlines() if line.split()}
    assert "yes, chosen" in verdicts["reference"]
    assert "no: " in verdicts["torch"]


def test_explain_answers_for_a_gpu_that_is_not_here(octavo: Octavo) -> None:
    status, shown, _ = octavo("explain", "quantize", "64x64", "--arch", "gfx942")
    assert status == 0
    assert "yes, chosen" in shown


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["transmogrify"], "unknown op 'transmogrify'; use one of"),
        (["scaled_mm"], "scaled_mm takes shapes"),
        (["scaled_mm", "8x8", "eight"], "'eight' is no shape"),
        (["quantize", "8x8", "--recipe", "fp4"], "unknown recipe 'fp4'"),
        (["quantize", "8x8", "--recipe", "bf16"], "in high precision"),
        (["quantize", "8x8", "--product", "sum"], "unknown product 'sum'"),
        (["quantize", "8x8", "--dtype", "int8"], "--dtype is 'int8'"),
        (["quantize", "8x8", "--device", "abacus"], "abacus"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_questions_are_one_line(octavo: Octavo, arguments: list[str], line: str) -> None:
    status, shown, error = octavo("explain", *arguments)
    assert (status, shown) == (2, "")
    assert line in error
    assert error.count("\n") == 1
