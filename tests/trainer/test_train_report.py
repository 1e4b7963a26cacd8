"""The report as a page and as Markdown: what it says, that nothing in it acts, and that it is one file."""

from __future__ import annotations

import copy
import json
import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from report_support import Content, run_of

from octavo.trainer import operand_stats, report, report_charts, report_files, report_html, report_markdown
from octavo.trainer import report_view as view
from octavo.trainer.records import Run

VOID = {"meta", "link", "br", "img", "path"}
EVIL = "<script>alert(1)</script>|`*_[x](y)\n&\"'"


class Page(HTMLParser):
    """The elements of a page, its text, and whether every element that is opened is closed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID or (tag == "path" and not self.get_starttag_text().endswith("/>")):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style",):
            self.texts.append(" ".join(data.split()))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.elements if found == tag]


def cells_of(page: str, name: str) -> dict[str, str]:
    """The row of a run in the table of the page, by column."""
    row = next(r for r in re.findall(r"<tr><th scope=\"row\">.*?</tr>", page) if f"</span>{name}" in r)
    return dict(re.findall(r'<td data-title="(.*?)">(.*?)</td>', row))


def test_the_table_has_the_numbers(compared: dict[str, Any]) -> None:
    run = compared["runs"][1]
    final = sum(run["loss"][-10:]) / 10
    rate = compared["config"]["batch_size"] * compared["config"]["seq_len"] / 0.5
    assert cells_of(report_html.render(compared), "rowwise") == {
        "Final loss": f"{final:.4f}",
        "Difference": "+1.000 %",
        "Held-out loss": f"{run['loss'][-1]:.4f}",
        "Held-out difference": "+1.000 %",
        "Perplexity": f"{math.exp(run['loss'][-1]):.3f}",
        "Tokens/s": f"{rate:,.0f}",
        "Speed": "1.00×",
        "Peak memory": "1.50 GiB",
        "FP8 share": "75.0 %",
        "Wall time": "12 s",
    }
    assert cells_of(report_html.render(compared), "bf16")["Difference"] == view.NONE


def test_a_column_without_a_value_is_left_out_and_mfu_is_shown_where_known(compared: dict[str, Any]) -> None:
    assert "MFU" not in {column.title for column in view.columns(compared)}
    compared["runs"][1]["mfu"] = 0.4321
    assert cells_of(report_html.render(compared), "rowwise")["MFU"] == "43.2 %"


def test_the_page_is_one_file_that_asks_for_nothing(compared: dict[str, Any]) -> None:
    source = report_html.render(compared)
    page = Page(source)
    assert not {"script", "link", "img", "iframe", "object", "audio", "video"} & {t for t, _ in page.elements}
    for _, attributes in page.elements:
        assert not {"src", "href", "xlink:href", "srcset", "data"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    assert "url(" not in source
    assert "@import" not in source
    assert {"charset": "utf-8"} in page.all("meta")
    assert any("width=device-width" in str(m.get("content")) for m in page.all("meta"))
    assert "prefers-color-scheme: dark" in source


def test_the_same_data_give_the_same_files_also_from_the_file(
    compared: dict[str, Any], tmp_path: Any
) -> None:
    compared["runs"][1]["loss"][-1] = None
    places = [tmp_path / name for name in ("a", "b", "c")]
    for place in places:
        place.mkdir()
    report_files.write(compared, places[0])
    report_files.write(copy.deepcopy(compared), places[1])
    report_files.write(json.loads((places[0] / "report.json").read_text()), places[2])
    for name in report_files.NAMES:
        assert len({(place / name).read_bytes() for place in places}) == 1, name
    assert sorted(path.name for path in places[0].iterdir()) == sorted(report_files.NAMES)


def test_nothing_that_comes_from_outside_acts(compared: dict[str, Any]) -> None:
    plain = [t for t, _ in Page(report_html.render(compared)).elements]
    compared["command"] = compared["model"]["name"] = compared["data"]["source"] = EVIL
    compared["machine"]["device"] = compared["versions"]["torch"] = compared["config"]["data"] = EVIL
    compared["baseline"] = None
    compared["runs"][0].update(name=EVIL, status="unwritable", failure=EVIL)
    layers = compared["runs"][1]["operands"]["layers"]
    layers[EVIL] = layers.pop("layers.0.w")
    source = report_html.render(compared)
    page = Page(source)
    assert "script" not in {t for t, _ in page.elements}
    assert {t for t, _ in page.elements} <= {*plain, "strong", "p"}
    assert sum(" ".join(EVIL.split()) in text for text in page.texts) >= 8
    markdown = report_markdown.render(compared)
    fences = markdown.split("```")
    outside = "".join(fences[::2])  # a command stands between fences, where nothing acts
    assert "<" not in outside
    assert "](y)" not in outside.replace("\\](y)", "")
    rows = [line for line in outside.splitlines() if line.startswith("|")]
    assert rows
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {len(view.columns(compared)) + 2, 5}


def test_a_command_cannot_leave_its_fence() -> None:
    assert report_markdown.fenced("a ```` b") == ["`````", "a ```` b", "`````", ""]


def test_the_curves_hold_every_run_and_their_difference(compared: dict[str, Any]) -> None:
    loss, difference = report_charts.loss_charts(compared)
    assert [line.name for line in loss.lines if not line.faint] == ["bf16", "rowwise"]
    assert [line.style for line in difference.lines] == ["0", "0"]  # each step, and the mean
    assert difference.zero is not None
    points = [tuple(map(float, p.split())) for p in loss.lines[0].path[1:].split("L")]
    assert len(points) == 50
    assert (points[0][0], points[-1][0]) == (0.0, 1000.0)
    assert all(0 <= y <= 1000 for _, y in points)
    assert points[0][1] < points[-1][1]  # a falling loss falls on the page
    assert {tick.text for tick in loss.x} >= {"10", "20", "30", "40", "50"}


def test_a_long_run_is_thinned_to_means() -> None:
    points = [(float(i), float(i % 2)) for i in range(1, 10_001)]
    thin = report_charts.thinned(points)
    assert len(thin) == report_charts.MOST_POINTS
    assert thin[0] == (10.5, 0.5)
    assert report_charts.thinned(points[:500]) == points[:500]


@pytest.mark.parametrize("values", [[3.0], [3.0, 3.0, 3.0], [1e-12, 2e-12], [1e9, 2e9], [-1.0, 1.0]])
def test_any_range_has_ticks_within_the_box(values: list[float]) -> None:
    curve = [(float(i), v) for i, v in enumerate(values, 1)]
    chart = report_charts.chart("", "", [("a", "0", curve, False)], zero=True)
    assert chart.x
    assert chart.y
    assert all(0 <= tick.place <= 100 for tick in (*chart.x, *chart.y))
    assert len({tick.text for tick in chart.y}) == len(chart.y)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([-0.1, 5e-17, 0.1], ["-0.1", "0", "0.1"]),
        ([31.35, 31.4, 31.45], ["31.35", "31.4", "31.45"]),
        ([1000.0, 2000.0, 2500.0], ["1,000", "2,000", "2,500"]),
        ([1e-12, 2e-12], ["1e-12", "2e-12"]),
        ([0.0], ["0"]),
        ([], []),
    ],
)
def test_ticks_have_as_few_digits_as_tell_them_apart(values: list[float], texts: list[str]) -> None:
    assert report_charts.tick_texts(values) == texts


def test_a_run_that_ended_early_says_so(content: Content) -> None:
    exact = run_of("bf16", [5.0, 4.0, 3.0])
    lost = run_of("rowwise", [5.0, 4.5, math.nan], "non-finite", failure="input of layers.1.w (output)")
    lost.validation_loss = None
    data = content(exact, lost, baseline="bf16")
    texts = " ".join(Page(report_html.render(data)).texts)
    expected = (
        "stopped at step 3: its loss or gradient was no finite number; first seen in input of layers.1.w"
    )
    assert expected in texts
    assert "non-finite at step 3" in texts
    assert cells_of(report_html.render(data), "rowwise")["Final loss"] == view.NONE
    assert expected in report_markdown.render(data)
    assert "nan" not in report_html.render(data).lower().replace("finance", "")
    curve = next(line for line in report_charts.loss_charts(data)[0].lines if line.name == "rowwise")
    assert curve.path.count("L") == 1


@pytest.mark.parametrize("status", ["interrupted", "unwritable", "non-finite"])
def test_a_run_that_ended_before_its_first_step_has_a_page(content: Content, status: str) -> None:
    empty = Run("rowwise", [], status, failure="cannot write 'x'")
    data = content(empty)
    page = report_html.render(data)
    Page(page)
    assert f"{status} at step 0" in page
    assert report_markdown.render(data)


def test_the_heat_map_has_the_worst_of_products_and_steps(compared: dict[str, Any]) -> None:
    series = compared["runs"][1]["operands"]["layers"]["layers.1.w"]["grad_weight"]["input"]
    series["sqnr_db"][3], series["saturated"][0] = 14.0, 0.25
    sqnr, saturated, underflowed = view.heats(compared)
    assert [layer for layer, _ in sqnr.rows] == ["layers.0.w", "layers.1.w", "layers.2.w"]
    assert [cell.text for cell in sqnr.rows[1][1]] == ["14.0", "26.0", "26.0"]
    assert sqnr.rows[1][1][0].badness == 1.0
    assert sqnr.rows[1][1][0].detail.endswith("26.0 in output, 14.0 in grad_weight")
    assert [cell.text for cell in saturated.rows[1][1]] == ["25.0", "0", "0"]
    assert [row[1][1].text for row in underflowed.rows] == ["0", "0.1", "0.2"]
    assert "14.0" in report_markdown.render(compared)
    chart = report_charts.sqnr_charts(compared)[0]
    assert (chart.title, [line.name for line in chart.lines]) == ("input", ["rowwise"])


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0"), (1e-9, "<0.001"), (5e-5, "0.005"), (0.0123, "1.2"), (1.0, "100.0")]
)
def test_a_small_share_is_not_nothing(share: float, text: str) -> None:
    assert view.share_text(share) == text


def test_an_operand_that_lost_nothing_or_was_not_quantized_is_a_dash(compared: dict[str, Any]) -> None:
    layers = compared["runs"][1]["operands"]["layers"]
    del layers["layers.0.w"]["output"], layers["layers.0.w"]["grad_input"]
    for operand in layers["layers.0.w"]["grad_weight"].values():
        operand["sqnr_db"] = [None] * len(operand["sqnr_db"])
    assert [cell.text for cell in view.heats(compared)[0].rows[0][1]] == [view.NONE] * 3
    report_html.render(compared)


def test_twenty_runs_differ_in_colour_or_dash(content: Content) -> None:
    runs = [run_of(f"recipe-{i}", [3.0, 2.0 + i]) for i in range(20)]
    data = content(run_of("bf16", [3.0, 2.0]), *runs, baseline="bf16")
    looks = {report_html._classes(style) for style in report_charts.styles(data).values()}
    assert len(looks) == 21
    page = Page(report_html.render(data))
    assert "21 runs" in " ".join(page.texts)


@pytest.mark.parametrize(("loss", "expected"), [(0.0, 1.0), (None, None), (math.nan, None), (800.0, None)])
def test_perplexity(loss: float | None, expected: float | None) -> None:
    assert report.perplexity(loss) == expected


def test_the_series_are_those_of_the_run(compared: dict[str, Any]) -> None:
    assert compared["runs"][0]["operands"] == {"steps": [], "layers": {}}
    assert compared["runs"][1]["operands"]["steps"] == list(range(5, 51, 5))
    assert set(compared["runs"][1]["operands"]["layers"]["layers.2.w"]["output"]["input"]) == set(
        operand_stats.MEASURES
    )
