"""Where the text comes from, how it is cut, and which batch belongs to which step."""

from __future__ import annotations

import gzip
import json
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.errors import UserError
from octavo.trainer import data
from octavo.trainer.data import documents

ALPHABET = np.arange(101, dtype=np.uint8)  # each token is its own position, so a batch shows where it was cut


def write(path: Path, files: dict[str, bytes]) -> Path:
    """``path`` with ``files`` in it."""
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def texts(path: Path | None) -> list[bytes]:
    return [document.text for document in documents.read(documents.find(path))]


# --- documents
# ---------------------------------------------------------------------------------------------------


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
    assert np.array_equal(first.validation, second.validation)
    assert first.files == first.documents == len([p for p in data.standard_library() if p.stat().st_size])
    assert b"def " in first.train[:100_000].tobytes()


def test_a_folder_is_read_in_order_without_hidden_empty_and_binary_files(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "texts",
        {
            "b/tests/deep.txt": b"in a folder called tests",
            "a.txt": b"first\n",
            "c.jsonl": b'{"text": "one line"}\n\n{"id": 2, "text": ""}\n{"text": "\xc3\xbcber"}',
            "z.md": b"last",
            "empty.txt": b"",
            "picture.png": b"\x89PNG\0\0",
            ".git/config": b"hidden",
            ".secret": b"hidden",
        },
    )
    assert texts(folder) == [b"first\n", b"one line", "über".encode(), b"last", b"in a folder called tests"]
    corpus = data.load(folder, 4)
    assert (corpus.source, corpus.files, corpus.documents) == (str(folder), 4, 5)


def test_packed_jsonl_is_the_same_text(tmp_path: Path) -> None:
    lines = b'{"text": "first"}\r\n{"text": "second"}\r\n'
    write(tmp_path, {"a.jsonl": lines, "a.jsonl.gz": gzip.compress(lines)})
    assert texts(tmp_path / "a.jsonl") == texts(tmp_path / "a.jsonl.gz") == [b"first", b"second"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a}', r"line 3 is not JSON \(Unterminated string starting at column 10\): mend"),
        (b"[" * 100_000, r"line 3 is not JSON \(.*recursion.*\): mend"),
        (b'{"text": "\xff"}', r"line 3 is not UTF-8 \(byte 11 of the line\): convert"),
        (b'["text"]', r'line 3 is no JSON object: each line must be like \{"text"'),
        (b'{"content": "a", "id": 1}', r"line 3 has no 'text' \(its fields: 'content', 'id'\): rename"),
        (b'{"text": null}', r"line 3 has a 'text' that is null: it must be a string"),
        (b'{"text": ["a"]}', r"line 3 has a 'text' that is a list: it must be a string"),
        (b'{"text": "\\ud800"}', r"line 3 has a 'text' with half a surrogate pair"),
    ],
)
def test_a_bad_line_of_jsonl_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=message) as caught:
        data.load(path, 2)
    assert "\n" not in str(caught.value)
    assert "a.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"no gzip at all", gzip.compress(b'{"text": "abcdefgh"}' * 99, mtime=0)[:-20]],
    ids=["no gzip", "cut off"],
)
def test_a_broken_gzip_file_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no whole gzip file"):
        data.load(write(tmp_path, {"a.jsonl.gz": content}), 2)


@pytest.mark.parametrize("kind", ["missing", "empty file", "empty folder", "binary", "empty jsonl"])
def test_data_without_text_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("data.jsonl" if kind == "empty jsonl" else "data")
    if kind == "empty folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes({"binary": b"\0\1\2\3", "empty jsonl": b'{"text": ""}\n'}.get(kind, b""))
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


def test_an_oversized_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_BYTES", 10)
    folder = write(tmp_path, {"a.txt": b"x" * 6, "b.txt": b"x" * 5})
    with pytest.raises(UserError, match="larger than"):
        data.load(folder, 2)
    assert len(data.load(folder / "a.txt", 2).train) == 3


# --- the held-out part
# -------------------------------------------------------------------------------------------


def test_one_document_is_cut_into_head_and_tail(text: Path) -> None:
    corpus = data.load(text, 32)
    assert corpus.train.tobytes() + corpus.validation.tobytes() == text.read_bytes()
    assert len(corpus.validation) == int(0.05 * text.stat().st_size)
    assert (corpus.source, corpus.files, corpus.documents) == (str(text), 1, 1)
    assert (corpus.tokenizer, corpus.vocab_size, corpus.bytes) == ("bytes", 256, text.stat().st_size)


def test_whole_documents_are_held_out_and_the_rest_keeps_its_order(tmp_path: Path) -> None:
    folder = write(tmp_path, {f"{n:03}.txt": f"document {n:03} ".encode() * 3 for n in range(100)})
    corpus = data.load(folder, 16)
    whole = [content + b"\n" for content in texts(folder)[:-1]] + [texts(folder)[-1]]
    held = corpus.validation.tobytes()
    inside = [document for document in whole if document in held]
    assert b"".join(inside) == held
    assert b"".join(document for document in whole if document not in inside) == corpus.train.tobytes()
    assert 0.05 <= len(held) / sum(map(len, whole)) <= 0.1
    assert len({document[9:12] for document in inside} & {b"099", b"098", b"097"}) < 3  # drawn, not the last


def test_documents_too_long_to_be_held_out_whole_are_cut_at_the_tail(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a.txt": b"a" * 999 + b"\n", "b.txt": b"b" * 1000})
    corpus = data.load(folder, 16)
    assert corpus.validation.tobytes() == b"b" * 100
    assert corpus.train.tobytes() == b"a" * 999 + b"\n" + b"b" * 900


@pytest.mark.parametrize("lengths", [[9, 9], [5, 13], [1] * 18, [17, 1], [300, 9, 9, 2]])
def test_both_parts_hold_a_sequence(lengths: list[int], tmp_path: Path) -> None:
    lines = [json.dumps({"text": "x" * (n - 1)}) for n in lengths if n > 1]
    lines += [json.dumps({"text": "\n"})] * lengths.count(1)
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    corpus = data.load(tmp_path / "a.jsonl", 7)
    assert min(len(corpus.train), len(corpus.validation)) >= 8


# --- batches
# -----------------------------------------------------------------------------------------------------


def test_targets_are_the_next_token() -> None:
    inputs, targets = data.Batches(ALPHABET, seq_len=10, batch_size=3, seed=0)(0)
    assert inputs.shape == targets.shape == (3, 10)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_an_epoch_trains_on_every_token_once_and_the_next_has_another_order() -> None:
    tokens = np.arange(1, 3 * 1000 + 5, dtype=np.uint16)  # 250 sequences of 12, and 3 tokens that fill none
    batches = data.Batches(tokens, seq_len=12, batch_size=5, seed=7)
    epochs = [torch.cat([batches(50 * epoch + i)[1] for i in range(50)]) for epoch in range(3)]
    for targets in epochs:
        assert torch.equal(targets.flatten().sort().values, torch.arange(2, 3002))
    assert len({tuple(targets[:, 0].tolist()) for targets in epochs}) == 3


def test_epochs_that_end_inside_a_batch_repeat_nothing() -> None:
    batches = data.Batches(ALPHABET, seq_len=10, batch_size=3, seed=0)
    starts = torch.cat([batches(step)[0][:, 0] for step in range(10)]).tolist()
    assert [sorted(starts[n : n + 10]) for n in (0, 10, 20)] == [list(range(0, 100, 10))] * 3


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    def starts(seed: int, step: int) -> list[int]:
        return data.Batches(ALPHABET, seq_len=10, batch_size=4, seed=seed)(step)[0][:, 0].tolist()

    walked = data.Batches(ALPHABET, seq_len=10, batch_size=4, seed=3)
    assert [walked(step)[0][:, 0].tolist() for step in range(6)] == [starts(3, step) for step in range(6)]
    assert walked(1)[0][:, 0].tolist() == starts(3, 1)  # and backwards
    assert starts(3, 5) != starts(4, 5)


def test_a_batch_larger_than_the_text_repeats_it() -> None:
    inputs, _ = data.Batches(ALPHABET[:21], seq_len=10, batch_size=5, seed=0)(0)
    assert sorted(inputs[:4, 0].tolist()) == [0, 0, 10, 10]


def test_tokens_may_be_memory_mapped(tmp_path: Path) -> None:
    ALPHABET.astype("<u4").tofile(tmp_path / "tokens")
    mapped = np.memmap(tmp_path / "tokens", dtype="<u4", mode="r")
    for first, second in zip(data.Batches(mapped, 10, 4, 0)(1), data.Batches(ALPHABET, 10, 4, 0)(1)):
        assert torch.equal(first, second)


# --- validation
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def targets() -> Callable[..., list[int]]:
    """Targets of all validation batches, one after the other."""

    def all_of(length: int, batch_size: int, limit: int | None) -> list[int]:
        found = []
        for inputs, targets in data.validation_batches(ALPHABET[:length], 10, batch_size, limit):
            assert torch.equal(targets, inputs + 1)
            assert len(inputs) <= batch_size
            found += targets.flatten().tolist()
        return found

    return all_of


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("length", [101, 100, 92, 11, 5])
def test_validation_covers_the_text_once(
    batch_size: int, length: int, targets: Callable[..., list[int]]
) -> None:
    assert targets(length, batch_size, None) == list(range(1, length))


def test_limited_validation_is_spread_over_the_text_whatever_the_batch(
    targets: Callable[..., list[int]],
) -> None:
    for batch_size in (1, 2, 3, 64):
        assert targets(101, batch_size, 59)[::10] == [1, 21, 41, 61, 81]
        assert targets(97, batch_size, 39)[::10] == [1, 31, 61]
        assert targets(101, batch_size, 1) == list(range(1, 11))
