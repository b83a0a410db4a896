# SPDX-License-Identifier: Apache-2.0
"""The report and the picture of a calibration."""

from xml.etree import ElementTree

import pytest

from nemo_rl_core.fp8.calibration_report import Row, report_text, rows_of, things_to_look_at
from nemo_rl_core.fp8.scale_picture import scale_picture

MANY = 1_000_000
SVG = "{http://www.w3.org/2000/svg}"


def owner(layer):
    return f"model.layers.{layer}.self_attn.attn"


def rows(amax=(10.0, 10.0, 10.0), kinds=("k", "v"), **rates):
    return [
        Row(owner=owner(n), kind=kind, amax=a, scale=2 * a / 448, **{"saturated": 0.0, "subnormal": 0.0, **rates})
        for n, a in enumerate(amax)
        for kind in kinds
    ]


def result_of(rows_):
    """A calibration result with these rows."""
    result = {"layers": {}, "amax": {}, "rates": {}}
    for row in rows_:
        result["layers"][f"{row.owner}.{row.kind}_scale"] = row.scale
        result["amax"].setdefault(row.owner, {"q": 1.0})[row.kind] = row.amax
        rates = {"saturated": row.saturated, "subnormal": row.subnormal}
        result["rates"].setdefault(row.owner, {})[row.kind] = rates
    return result


def test_a_row_has_the_headroom_that_the_margin_gave():
    found = rows_of(result_of(rows()))
    assert list(found) == rows()
    assert {round(row.headroom, 9) for row in found} == {2.0}


def test_an_outlier_is_pointed_out_and_its_neighbours_are_not():
    result = result_of([*rows((10.0, 10.0, 45.0), ("k",)), *rows((10.0, 10.0, 39.0), ("v",))])
    (remark,) = things_to_look_at(result, MANY)
    assert owner(2) in remark
    assert "k reaches 45, 4.5 times the median of all layers (10)" in remark


def test_lost_precision_is_pointed_out_for_each_row():
    remarks = list(things_to_look_at(result_of(rows((10.0,), subnormal=0.02)), MANY))
    assert len(remarks) == 2
    assert all("fewer bits" in remark for remark in remarks)


def test_what_a_percentile_leaves_out_is_one_line_with_the_count_and_the_worst():
    few, many = rows((10.0,) * 40, saturated=1e-7), rows(saturated=0.02, kinds=("v",))[1]
    shown = [row for row in few if (row.owner, row.kind) != (many.owner, "v")]
    (remark,) = things_to_look_at(result_of([*shown, many, *rows((10.0,), ("q",))]), MANY)
    assert "values of 80 of 81 scales saturate" in remark
    assert f"at most 2.000 %, of v in `{owner(1)}`" in remark


def test_the_report_has_a_line_for_each_row_and_no_share_that_is_rounded_to_none():
    text = report_text(result_of(rows(saturated=1e-7, subnormal=0.005)), {"model": "tiny"}, MANY)
    assert "| model | tiny |" in text
    table = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(table) == 6
    assert table[0] == f"| `{owner(0)}` | k | 10 | 0.0446429 | 2.00 | < 0.001 % | 0.500 % |"
    assert "\nNothing: tokens are many" in report_text(result_of(rows()), {}, MANY)


def test_few_tokens_are_pointed_out():
    (remark,) = things_to_look_at(result_of(rows()), 1234)
    assert "1,234 tokens are few" in remark


@pytest.mark.parametrize("amax", [(10.0,), (10.0,) * 3, (1e-6, 1.0, 1e6), tuple(1.0 + n for n in range(200))])
def test_the_picture_has_a_point_for_each_scale_inside_its_frame_and_higher_for_more(amax):
    shown = rows(amax, ("q", "k", "v"))
    numbers = {owner(n): n for n in range(len(amax))}
    root = ElementTree.fromstring(scale_picture(shown, numbers, "a <b> & c"))
    assert root.find(f"{SVG}text").text == "a <b> & c"
    notes = [title.text for title in root.iter(f"{SVG}title")]
    assert set(notes) == {f"{row.owner}, {row.kind}: {row.scale:.6g}" for row in shown}
    places = [
        (float(mark.get("cx")), float(mark.get("cy")))
        for mark in root.iter(f"{SVG}circle")
        if mark.find(f"{SVG}title") is not None
    ]
    assert len(places) == len(amax)
    assert all(78 < x < 836 and 64 < y < 364 for x, y in places)
    # SVG counts downwards.
    for (x, y), (next_x, next_y), less, more in zip(places, places[1:], amax, amax[1:], strict=False):
        assert x < next_x
        assert (next_y < y) == (less < more)
    texts = [text.get("text-anchor") for text in root.iter(f"{SVG}text")]
    assert texts.count("end") >= 2
    assert texts.count("middle") <= 26
