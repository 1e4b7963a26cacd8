"""``--config FILE``: TOML, JSON and an earlier report say what the command line would."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resume_support import Job, run

from octavo import cli
from octavo.errors import UserError
from octavo.trainer import settings
from octavo.trainer.config import TrainConfig

EVERYTHING: dict[str, Any] = {
    "model": "llama3-100m",
    "recipe": ["rowwise", "mxfp8"],
    "compare": "bf16",
    "data": "text.txt",
    "tokenizer": "tokenizer.json",
    "init_from": "weights",
    "steps": 7,
    "seq_len": 64,
    "batch_size": 6,
    "grad_accum": 3,
    "lr": 1,  # a whole number is a number
    "min_lr": 0.2,
    "warmup": 2,
    "weight_decay": 0.0,
    "clip": 0.5,
    "seed": 9,
    "device": "cpu",
    "dtype": "bfloat16",
    "compile": True,
    "activation_checkpoint": True,
    "fast_accum": True,
    "eval_every": 3,
    "monitor_every": 0,
    "checkpoint_dir": "saved",
    "checkpoint_every": 2,
    "keep": 4,
    "resume": True,
    "save_final": "final",
    "log": "log.jsonl",
    "tensorboard": "tb",
    "out": "out",
}
PATHS = ("data", "tokenizer", "init_from", "checkpoint_dir", "save_final", "log", "tensorboard", "out")
FIELDS: dict[str, Any] = {
    name: Path(value) if name in PATHS else value
    for name, value in EVERYTHING.items()
    if name not in ("recipe", "compare")
}
EXPECTED = TrainConfig(**FIELDS, recipes=("bf16", "rowwise", "mxfp8"), baseline="bf16")


def as_toml(options: dict[str, Any]) -> str:
    return "".join(f"{name.replace('_', '-')} = {json.dumps(value)}\n" for name, value in options.items())


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_every_option_can_stand_in_a_file() -> None:
    assert EVERYTHING.keys() == settings.OPTIONS.keys()


@pytest.mark.parametrize("name", ["job.toml", "job.json", "job.conf"])
def test_a_file_gives_every_option(tmp_path: Path, name: str) -> None:
    text = json.dumps(EVERYTHING) if name.endswith(".json") else as_toml(EVERYTHING)
    assert settings.resolve({}, written(tmp_path, name, text)) == EXPECTED


def test_the_command_line_wins(tmp_path: Path) -> None:
    path = written(tmp_path, "job.toml", as_toml(EVERYTHING))
    given = {"steps": 9, "recipe": ["blockwise"], "resume": False, "seed": None}
    expected = replace(EXPECTED, steps=9, recipes=("bf16", "blockwise"), resume=False)
    assert settings.resolve(given, path) == expected


def test_nothing_given_is_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert settings.resolve({}) == TrainConfig(recipes=("rowwise",))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert settings.resolve({}) == TrainConfig(recipes=("rowwise",), device="cuda", dtype="bfloat16")


def test_a_report_trains_the_same_again(job: Job, tmp_path: Path) -> None:
    first = job(recipes=("bf16", "rowwise"), baseline="bf16", warmup=2, lr=3e-3)
    expected = run(first)
    given = {"out": tmp_path / "again", "data": first.data}
    again = settings.resolve(given, first.out / "report.json")
    assert again == replace(first, out=tmp_path / "again", monitor_every=again.monitor_every)
    assert again.monitor_steps == first.monitor_steps
    assert run(again).losses == expected.losses


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz = 3", r"has the unknown option 'stepz': did you mean 'steps'\?"),
        ("xyzzy = 3", r"has the unknown option 'xyzzy': known are model, "),
        ("recipes = 'bf16'", r"has the unknown option 'recipes': did you mean 'recipe'\?"),
        ("steps = '3'", r"has steps = '3': it must be a whole number"),
        ("steps = 3.5", r"has steps = 3.5: it must be a whole number"),
        ("steps = true", r"has steps = True: it must be a whole number"),
        ("lr = 'big'", r"has lr = 'big': it must be a number"),
        ("compile = 1", r"has compile = 1: it must be true or false"),
        ("data = 3", r"has data = 3: it must be a path in quotes"),
        ("recipe = [1]", r"has recipe = \[1\]: it must be a name or a list of names"),
        ("steps = ", r"is not TOML: "),
        ("", None),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(tmp_path: Path, text: str, message: str | None) -> None:
    path = written(tmp_path, "job.toml", text)
    if message is None:
        assert settings.read(path) == {}
        return
    with pytest.raises(UserError, match=message) as caught:
        settings.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("job.json", b"{", "is not JSON"),
        ("job.json", b"[1]", "holds no options"),
        ("job.toml", b"\xff\xfe", "is no text"),
        ("job.json", b"[" * 100_000, "is not JSON"),
    ],
)
def test_what_is_no_settings_file_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        settings.read(tmp_path / name)


def test_a_file_that_is_not_there_is_refused_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--config", str(tmp_path / "none.toml")])
    assert caught.value.code == 2
    assert "cannot read --config" in capsys.readouterr().err
