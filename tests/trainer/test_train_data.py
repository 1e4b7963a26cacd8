"""Where the text comes from and which batch belongs to which step."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.trainer import data
from octavo.trainer.config import UserError

ALPHABET = np.arange(101, dtype=np.uint8)  # each token is its own position, so a batch shows where it was cut


def test_standard_library_is_real_python_without_tests_and_packages() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root) for path in data.standard_library()]
    assert {Path("argparse.py"), Path("json/decoder.py")} <= set(paths)
    assert all(path.suffix == ".py" for path in paths)
    assert not any({"site-packages", "dist-packages", "test", "tests"} & set(path.parts) for path in paths)
    assert paths == [path.relative_to(root) for path in data.standard_library()]


def test_standard_library_is_the_default_and_the_same_twice() -> None:
    first, second = data.load(None, 128), data.load(None, 128)
    assert len(first.train) > 5_000_000
    assert first.sha256 == second.sha256
    assert first.files == len([p for p in data.standard_library() if p.stat().st_size])
    assert b"def " in first.train[:100_000].tobytes()


def test_a_file_is_cut_into_head_and_tail(text: Path) -> None:
    corpus = data.load(text, 32)
    assert corpus.train.tobytes() + corpus.validation.tobytes() == text.read_bytes()
    assert len(corpus.validation) == int(0.05 * text.stat().st_size)
    assert (corpus.source, corpus.files) == (str(text), 1)


def test_a_folder_is_read_in_order_without_hidden_empty_and_binary_files(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    for name, content in {
        "b/tests/deep.txt": b"in a folder called tests",
        "a.txt": b"first\n",
        "z.md": b"last",
        "empty.txt": b"",
        "picture.png": b"\x89PNG\0\0",
        ".git/config": b"hidden",
        ".secret": b"hidden",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    text, source, files = data.read_text(folder)
    assert text == b"first\nlast\nin a folder called tests"
    assert (source, files) == (str(folder), 3)


@pytest.mark.parametrize("kind", ["missing", "empty file", "empty folder", "binary"])
def test_data_without_text_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    if kind == "empty folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(b"" if kind == "empty file" else b"\0\1\2\3")
    message = "does not exist: give" if kind == "missing" else "holds no text: give"
    with pytest.raises(UserError, match=message):
        data.load(path, 8)


def test_data_shorter_than_two_sequences_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"0123456789\n")
    with pytest.raises(UserError, match=r"has 11 bytes but --seq-len 8 needs at least 18"):
        data.load(path, 8)
    corpus = data.load(path, 4)  # 11 bytes are two sequences of 5 and one over
    assert (len(corpus.train), len(corpus.validation)) == (6, 5)


def test_an_oversized_text_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "MAX_BYTES", 10)
    path = tmp_path / "large.txt"
    path.write_bytes(b"x" * 11)
    with pytest.raises(UserError, match="larger than"):
        data.load(path, 2)


def test_targets_are_the_next_token() -> None:
    inputs, targets = data.Batches(ALPHABET, seq_len=10, batch_size=3, seed=0)(0)
    assert inputs.shape == targets.shape == (3, 10)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_an_epoch_holds_every_sequence_once_and_the_next_has_another_order() -> None:
    batches = data.Batches(ALPHABET, seq_len=10, batch_size=5, seed=0)
    assert batches.count == 10
    epochs = [
        torch.cat([batches(2 * epoch + half)[0][:, 0] for half in range(2)]).tolist() for epoch in range(2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 100, 10))
    assert epochs[0] != epochs[1]


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    def starts(seed: int, step: int) -> list[int]:
        return data.Batches(ALPHABET, seq_len=10, batch_size=4, seed=seed)(step)[0][:, 0].tolist()

    walked = data.Batches(ALPHABET, seq_len=10, batch_size=4, seed=3)
    assert [walked(step)[0][:, 0].tolist() for step in range(6)] == [starts(3, step) for step in range(6)]
    assert starts(3, 5) != starts(4, 5)


def test_a_batch_larger_than_the_text_repeats_it() -> None:
    inputs, _ = data.Batches(ALPHABET[:21], seq_len=10, batch_size=5, seed=0)(0)
    assert sorted(inputs[:4, 0].tolist()) == [0, 0, 10, 10]


def test_validation_batches_are_spread_over_the_tail_and_limited() -> None:
    def starts(limit: int, batch_size: int = 2) -> list[int]:
        return [int(n) for x, _ in data.validation_batches(ALPHABET, 10, batch_size, limit) for n in x[:, 0]]

    assert starts(limit=1000) == list(range(0, 100, 10))
    assert starts(limit=50) == [0, 20, 40, 60, 80]
    assert starts(limit=1, batch_size=3) == [0, 30, 60]  # never less than a batch
