"""The charts: round ticks, well-formed SVG, and no number that a browser cannot read."""

import xml.etree.ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainer.report.plots import Bar, Series, bar_chart, heatmap, line_chart, nice_ticks, readable_width, stacked_bars

finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(finite, finite, st.integers(2, 8))
@example(0.0, 5e-324, 2)  # a span without a logarithm
def test_ticks_cover_the_range_evenly(one: float, other: float, about: int) -> None:
    low, high = min(one, other), max(one, other)
    ticks = nice_ticks(low, high, about)
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= about + 2


def test_ticks_are_round() -> None:
    assert nice_ticks(0, 100, 4) == [0, 25, 50, 75, 100]
    assert nice_ticks(0.59, 1.0) == [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]


CHARTS = {
    "lines": line_chart(
        [Series("a <b>", [(0, 1.0), (1, None), (2, 3.0)]), Series("c", [(0, 2.0)], 1, dashed=True)],
        title="a & b",
        x_label="epoch",
    ),
    "no points": line_chart([Series("a", [])], title="none"),
    "flat": line_chart([Series("a", [(1, 0.0), (1, 0.0)])], title="flat"),
    "bars": bar_chart([Bar("<i>", 0.0, "0 %"), Bar("b", 3.0, "3 %", dots=(2.0, 4.0))], title="bars", reference=2.5),
    "no bars": bar_chart([], title="none"),
    "stack": stacked_bars([("round 1", [3, 0, 1])], [("x", "red"), ("y", "blue"), ("z", "grey")], title="s"),
    "empty stack": stacked_bars([("round 1", [0])], [("x", "red")], title="s"),
    "heat": heatmap([[0.5, 0.5], [None, None]], title="m", names=["<a>", "b"], row_label="r", column_label="c"),
}


@pytest.mark.parametrize("name", CHARTS)
def test_charts_are_well_formed_and_titled(name: str) -> None:
    svg = ET.fromstring(str(CHARTS[name]))
    assert svg.tag == "svg"
    assert svg[0].tag == "title"
    assert svg[0].text == svg.attrib["aria-label"]
    assert "nan" not in str(CHARTS[name])
    assert "inf" not in str(CHARTS[name])


def test_a_missing_value_breaks_the_line() -> None:
    svg = ET.fromstring(str(CHARTS["lines"]))
    path = next(element.attrib["d"] for element in svg.iter("path") if element.find("title") is not None)
    assert path.count("M") == 2


def test_heatmaps_share_one_scale() -> None:
    def opacity(matrix: list[list[float]]) -> list[str]:
        svg = ET.fromstring(str(heatmap(matrix, title="m", names=["a", "b"], row_label="r", column_label="c")))
        return [rect.attrib.get("fill-opacity", "1") for rect in svg.iter("rect")]

    assert opacity([[0.25, 0.0], [0.0, 0.25]])[0] == opacity([[0.25, 0.75], [0.75, 0.25]])[0] == "0.500"


def test_a_label_stands_beside_the_reference_line() -> None:
    def starts(reference: float) -> list[float]:
        bars = [Bar("one", 3.0, "30.0 %"), Bar("two", 9.0, "90.0 %")]
        svg = ET.fromstring(str(bar_chart(bars, title="bars", high=10, reference=reference, ticks=None, width=480)))
        texts = [float(text.attrib["x"]) for text in svg.iter("text") if text.attrib["class"] == "value"]
        (line,) = [float(each.attrib["x1"]) for each in svg.iter("line") if each.attrib["class"] == "reference"]
        return [text - line for text in texts]

    assert starts(3.5)[0] == 7, "moved"
    assert starts(8.0)[0] < -60, "not in its way"


@pytest.mark.parametrize("names", [[str(number) for number in range(10)], ["a long name"] * 16])
def test_a_matrix_drawn_at_its_readable_width_has_numbers(names: list[str]) -> None:
    matrix = [[0.5] * len(names)] * len(names)
    width = readable_width(names, 8)
    labels = {"title": "m", "names": names, "row_label": "r", "column_label": "c", "longest": 8}
    svg = str(heatmap(matrix, width=width, **labels))
    assert svg.count(">50</text>") == len(names) ** 2
    assert str(heatmap(matrix, width=width // 2, **labels)).count(">50</text>") == 0
