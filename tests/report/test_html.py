import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest

from hessquant.report.html import to_html

HOSTILE = "model.layers.0.<script>alert('x')</script>\"><img src=x onerror=alert(1)>&amp;.weight"
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Collects tags, attributes and visible text, and fails on tags that do not nest."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.text = [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def count(self, tag, **attributes):
        wanted = {key.strip("_"): value for key, value in attributes.items()}
        return sum(found == tag and wanted.items() <= attrs.items() for found, attrs in self.tags)


def text_of(report):
    return "\n".join(Page(to_html(report)).text)


def test_the_page_is_well_formed_and_needs_nothing_else(run_report):
    html = to_html(run_report)
    page = Page(html)
    assert html.startswith("<!DOCTYPE html>")
    assert not re.search(r"https?://|url\(|@import", html)
    assert all("src" not in attrs and "href" not in attrs for _, attrs in page.tags)
    assert "prefers-color-scheme: dark" in html


def test_the_page_shows_the_key_figures(run_report):
    text = text_of(run_report)
    mean = sum(layer.relative_to_rtn for layer in run_report.layers) / len(run_report.layers)
    for figure in (f"{mean:.3f}", "4.3125", "108.7 MiB", "21.1 %", "210 / 210", "3 min 21 s", "1.4 GiB", "65,536"):
        assert figure in text
    assert "2.13.0" in text
    assert "window_length" in text
    assert run_report.calibration.digest in text


def test_what_was_degraded_comes_before_every_figure(run_report):
    html = to_html(run_report)
    place = html.index(run_report.degraded[0])
    assert place < html.index('class="tiles"')
    assert "Degraded (2)" in html
    clean = text_of(replace(run_report, degraded=()))
    assert "Nothing was degraded" in clean
    assert "Degraded" not in clean


def test_every_name_and_sentence_is_escaped(run_report):
    plan = run_report.plan
    target = replace(plan.targets[0], name=HOSTILE)
    server = replace(plan.servers[0], server=HOSTILE, reason=HOSTILE)
    tensor = replace(plan.untouched[0], reason=HOSTILE)
    report = replace(
        run_report,
        version=HOSTILE,
        plan=replace(
            plan, source=HOSTILE, architecture=HOSTILE, targets=(target,), servers=(server,), untouched=(tensor,)
        ),
        layers=(replace(run_report.layers[0], name=HOSTILE),),
        degraded=(HOSTILE,),
        calibration=replace(run_report.calibration, source=HOSTILE, digest=HOSTILE),
        settings={HOSTILE: HOSTILE, "include": (HOSTILE,)},
        environment={HOSTILE: HOSTILE},
    )
    page = Page(to_html(report))
    assert page.count("script") == 1
    assert page.count("img") == 0
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert HOSTILE in page.text


def test_each_weight_has_a_mark_in_both_charts_and_a_row(run_report):
    page = Page(to_html(run_report))
    titles = [attrs for tag, attrs in page.tags if tag == "g" and "data-series" in attrs]
    bounds = 7
    assert len(titles) == 2 * len(run_report.layers) + bounds
    assert page.count("polyline", class_="path s0") == 1
    assert page.count("td", class_="text name") == len(run_report.layers)


def test_experts_of_one_block_share_a_mark_at_their_mean(run_report):
    names = [f"model.layers.0.experts.{expert}.up.weight" for expert in range(4)]
    layers = tuple(
        replace(run_report.layers[0], name=name, loss=loss, rtn_loss=1.0, output_energy=10.0)
        for name, loss in zip(names, (0.1, 0.2, 0.3, 0.8), strict=True)
    )
    targets = tuple(replace(run_report.plan.targets[0], name=name) for name in names)
    text = text_of(replace(run_report, layers=layers, plan=replace(run_report.plan, targets=targets)))
    assert text.count("experts.*.up of block 0, mean of 4: 0.350 of RTN's error, 3.5 % of its output") == 2


def test_a_higher_loss_is_drawn_higher(run_report):
    low, high = run_report.layers[0], run_report.layers[7]
    report = replace(run_report, layers=(replace(low, loss=0.1, rtn_loss=1.0), replace(high, loss=0.9, rtn_loss=1.0)))
    chart = to_html(report).split("<svg")[2]
    heights = [float(y) for y in re.findall(r'<circle class="mark" cx="[\d.]+" cy="([\d.]+)"', chart)]
    assert len(heights) == 2
    assert heights[1] < heights[0]


def told_bounds(run_report):
    """A report of one layer: floor 0.2, expected 0.5, loss 0.9 of round-to-nearest's."""
    layer = replace(run_report.layers[0], rtn_loss=1.0, floor=0.2, expected_loss=0.5, loss=0.9)
    return replace(run_report, layers=(layer,))


def test_the_floor_is_drawn_as_a_tick_the_expected_loss_as_a_ring_and_the_loss_as_a_dot(run_report):
    chart = to_html(told_bounds(run_report)).split("<svg")[-1]
    assert "loss 0.900, expected 0.500, floor 0.200 of RTN's" in unescape(chart)
    tick = re.search(r'<line x1="([\d.]+)" x2="\1" [^>]*stroke-width="2"', chart)
    span = re.search(r'<line class="span" x1="([\d.]+)" x2="([\d.]+)"', chart)
    ring = re.search(r'<circle cx="([\d.]+)" [^>]*fill="none"', chart)
    dot = re.search(r'<circle class="mark" cx="([\d.]+)"', chart)
    floor, expected, loss = (float(found[1]) for found in (tick, ring, dot))
    assert (float(span[1]), float(span[2])) == (floor, loss)
    assert (expected - floor) / (loss - floor) == pytest.approx(3 / 7, abs=0.01)
    assert floor < expected < loss


def test_the_table_has_every_figure_under_its_heading(run_report):
    table = to_html(told_bounds(run_report)).split('<table class="sortable">')[1].split("</table>")[0]
    headings = re.findall(r"<button[^>]*>([^<]*)<", table)
    cells = re.findall(r"<td[^>]*>([^<]*)<", table)
    told = dict(zip(headings, cells, strict=True))
    assert (told["error"], told["expected"], told["floor"]) == ("0.900", "0.500", "0.200")


@pytest.mark.parametrize(
    "change",
    [
        {"loss": 0.0},
        {"loss": 0.0, "rtn_loss": 0.0, "output_energy": 0.0},
        {"loss": 900.0, "rtn_loss": 1.0},
        {"expected_loss": 0.0, "floor": 0.0},
    ],
)
def test_extreme_layers_can_be_drawn(run_report, change):
    report = replace(run_report, layers=tuple(replace(layer, **change) for layer in run_report.layers))
    html = to_html(report)
    Page(html)
    assert not re.search(r'="(nan|-?inf)', html)


def test_a_run_without_layers_has_a_page(run_report):
    assert "org/small-model" in text_of(replace(run_report, layers=()))


def test_a_long_table_is_cut_to_the_worst_and_says_so(run_report):
    names = [f"model.layers.0.experts.{expert}.up.weight" for expert in range(2100)]
    layers = tuple(
        replace(run_report.layers[0], name=name, output_energy=1.0 + index) for index, name in enumerate(names)
    )
    targets = tuple(replace(run_report.plan.targets[0], name=name) for name in names)
    html = to_html(replace(run_report, layers=layers, plan=replace(run_report.plan, targets=targets)))
    assert "The 2,000 of 2,100 layers" in html
    assert "experts.0.up<" in html
    assert "experts.2050.up<" not in html


def test_sort_values_are_the_exact_numbers(run_report):
    layer = run_report.layers[0]
    row = to_html(replace(run_report, layers=(layer,))).split("<tbody>")[1].split("</tbody>")[0]
    assert f'data-value="{layer.relative_to_rtn}"' in row
    assert f'data-value="{layer.tokens}"' in row


def test_the_label_of_a_kind_is_escaped_everywhere(run_report):
    name = "a.0.<b onload=x>.weight"
    target, layer = replace(run_report.plan.targets[0], name=name), replace(run_report.layers[0], name=name)
    html = to_html(replace(run_report, layers=(layer,), plan=replace(run_report.plan, targets=(target,))))
    assert "<b onload" not in html
    assert html.count("&lt;b onload=x&gt;") >= 5
