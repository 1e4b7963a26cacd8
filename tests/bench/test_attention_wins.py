"""The attention suite's cases, and the boxes that its wins make."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from octavo import hardware
from octavo.bench import attention_suite, attention_wins, cases, wins_table
from octavo.bench.attention_wins import Point
from octavo.operators import attention, wins


def test_every_case_is_named_so_that_its_shape_can_be_read_back() -> None:
    suite = cases.cases("attention")
    found = {attention_wins.point({"group": c.group, "case": c.case}) for c in suite}
    assert len(found) == len(suite) == 2 * len(attention_suite.shapes())
    assert Point("attention_backward", 192, 128, True, 8192, 21) in found
    with pytest.raises(ValueError, match="is no case of the attention suite"):
        attention_wins.point({"group": "models", "case": "fp32 8x8"})


def test_flops_are_those_of_the_pairs_that_are_seen() -> None:
    assert attention_suite.flops(2, 3, 4, 8, 16, False, False) == 2 * 2 * 3 * 16 * (8 + 16)
    assert attention_suite.flops(1, 1, 4, 8, 16, True, True) == 2 * 10 * (3 * 8 + 2 * 16)


def _entry(length: int, ratio: float, causal: bool = True, kind: str = "forward") -> dict:
    name = f"bf16 B={8192 // length} H=32 L={length}" + (" causal" if causal else "")
    times = {"octavo": 1.0, "aten": ratio}
    return {
        "group": f"{kind}_128",
        "case": name,
        "ms": times,
        "checked": True,
        "taken": True,
        "bytes": 1,
        "flops": 1,
    }


def test_calls_are_taken_where_their_length_lies_between_wins(tmp_path: Path, monkeypatch) -> None:
    entries = [
        _entry(512, 1.3),
        _entry(1024, 1.2),
        _entry(2048, 1.0),
        _entry(4096, 1.2),
        _entry(512, 0.9, causal=False),
    ]
    machine = {"gpu": "a card", "architecture": "gfx950"}
    content = {"suite": "attention", "date": "a day", "machine": machine, "cases": entries}
    (tmp_path / "attention-card.json").write_text(json.dumps(content))
    wins_table.write(tmp_path, tmp_path)
    monkeypatch.setenv("OCTAVO_WINS", str(tmp_path))
    wins.reload()
    try:
        taken = {
            (length, causal, heads)
            for length in (256, 512, 700, 1024, 1500, 2048, 4096, 8192)
            for causal in (True, False)
            for heads in (8, 512)
            if _measured(length, causal, heads) is None
        }
    finally:
        wins.reload()
    assert taken == {(512, True, 512), (700, True, 512), (1024, True, 512), (4096, True, 512)}


def _measured(length: int, causal: bool, heads: int) -> str | None:
    q = torch.empty(1, heads, length, 128, dtype=torch.bfloat16, device="meta")
    with mock.patch.object(hardware, "architecture", return_value="gfx950"):
        return attention.measured("attention", q, q, q, causal)
