"""A run report as one HTML page that needs nothing else: no scripts, styles or fonts from elsewhere."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files

from hessquant.report.charts import Point, bounds_chart, legend, loss_chart, output_error_chart
from hessquant.report.figures import (
    SERVER_HEADINGS,
    Kind,
    kind_among,
    kinds_of,
    notes,
    remark,
    totals,
    untouched_by_reason,
    variety,
    worst,
)
from hessquant.report.units import format_bytes, format_grid, format_group, format_percent, format_ratio, format_seconds
from hessquant.results import LayerRecord, RunReport

PAGE_NAME = "hessquant-report.html"
"""File name of the page within an output directory."""

_ROWS_SHOWN = 2000


def to_html(report: RunReport) -> str:
    """Give the page: what was degraded, headline figures, charts, bounds, every layer, settings, environment."""
    plan = report.plan
    title = f"Hessquant report: {plan.source}"
    sections = (
        _degraded(report.degraded),
        *(f'<p class="note">{escape(sentence)}.</p>' for sentence in report.retreats),
        f'<div class="tiles">{_tiles(report)}</div>',
        *(_layer_sections(report) if report.layers else ()),
        _details(report),
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_asset('report.css')}</style></head><body>"
        f"<header><h1>{escape(plan.source)}</h1>"
        f"<p>{escape(plan.architecture)}, quantized by Hessquant {escape(report.version)}: "
        f"{len(plan.targets):,} weights in {len(plan.blocks):,} blocks, {_grids(report)}"
        f"{f', on {escape(plan.place)}' if plan.place else ''}"
        f"{f'; source: {escape(plan.source_form)}' if plan.source_form else ''}</p></header>"
        f"<main>{''.join(sections)}</main><script>{_asset('report.js')}</script></body></html>\n"
    )


def _degraded(sentences: Sequence[str]) -> str:
    if not sentences:
        return '<p class="note">Nothing was degraded.</p>'
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<section class="degraded"><h2>Degraded ({len(sentences):,})</h2><ul>{items}</ul></section>'


def _tiles(report: RunReport) -> str:
    plan, summed = report.plan, totals(report.layers)
    figures = [
        (format_ratio(summed.mean_relative_to_rtn), "mean error, where round-to-nearest (RTN) is 1"),
        (format_percent(summed.mean_relative_output_error), "mean error relative to the layer's output"),
        (f"{round(plan.bits_per_weight, 4):g}", "bits per weight, scales and zeros included"),
        (format_bytes(report.output_bytes), f"on disk, from {format_bytes(plan.source_bytes)}"),
        (
            format_percent(plan.unquantized_share),
            "of the weight bytes left in 16 bit; "
            f"{format_percent(plan.unquantized_matrices)} without embeddings and head",
        ),
        (f"{report.verified_tensors:,} / {summed.layers:,}", "weights re-read and decoded exactly"),
        (format_seconds(report.seconds), f"wall time; {format_seconds(report.cpu_seconds)} of CPU time"),
        (format_bytes(report.peak_memory_bytes), "peak memory"),
        (f"{report.forwards_per_block:g}", "forward passes per block and window"),
        (f"{report.calibration.tokens:,}", "calibration tokens"),
    ]
    if plan.allocation is not None:
        expected, uniform = plan.allocation.predicted_kl, plan.allocation.uniform_kl
        figures.append(
            (
                f"{expected:.4f}",
                f"nats of KL expected of the bits that were chosen; {uniform:.4f} with one setting for all",
            )
        )
    if report.resumed_blocks:
        figures.append((f"{report.resumed_blocks}", "blocks finished by an earlier, interrupted run"))
    return "".join(
        f'<div class="tile"><b>{escape(figure)}</b><span>{escape(what)}</span></div>' for figure, what in figures
    )


def _layer_sections(report: RunReport) -> tuple[str, ...]:
    by_name = kinds_of(report.layers)
    kinds, points = list(by_name.values()), _points(report, by_name)
    return (
        _section(
            "Error relative to round-to-nearest",
            "One mark per weight, in the order they were quantized; lower is better, and 1 means that calibration "
            "gained nothing. Experts of one block share a mark, at their mean.",
            legend(kinds) + loss_chart(points),
        ),
        _section(
            "Error relative to the layer's output",
            "Squared error of a layer's outputs divided by their squared size, by block; a line up is ten times more.",
            legend(kinds) + output_error_chart(points),
        ),
        _section(
            "Would a better algorithm help, or only more bits?",
            "Means per kind of weight, where round-to-nearest's error is 1. Dot: the error now. Ring: what theory "
            "expects of this method on this grid. Tick: what no order of the columns can be expected to beat. A dot "
            "close to its tick leaves little for any such algorithm to win: only more bits or smaller groups help. A "
            "dot far right of its ring points at the damping or at clipped weights.",
            bounds_chart(kinds),
        ),
        _layer_table(report.layers),
    )


def _points(report: RunReport, kinds: Mapping[str, Kind]) -> list[Point]:
    """Like weights of one block (experts) become one point."""
    series = {name: index for index, name in enumerate(kinds)}
    block_of = {target.name: target.block for target in report.plan.targets}
    groups: dict[tuple[int, str], list[LayerRecord]] = {}
    for layer in report.layers:
        groups.setdefault((block_of[layer.name], kind_among(layer)), []).append(layer)
    points = []
    for (block, kind), group in groups.items():
        summed = totals(group)
        loss, error = summed.mean_relative_to_rtn, summed.mean_relative_output_error
        # What is not built is in none of the blocks.
        where = f" of block {block}" if group[0].built else ""
        name = group[0].name if len(group) == 1 else f"{kinds[kind].label}{where}, mean of {len(group)}"
        figures = f"{format_ratio(loss)} of RTN's error, {format_percent(error)} of its output"
        title = f"{name}: {'; '.join((figures, *notes(summed)))}"
        points.append(Point(series[kind], block, title, loss, error))
    return points


def _layer_table(layers: Sequence[LayerRecord]) -> str:
    shown = layers if len(layers) <= _ROWS_SHOWN else worst(layers, _ROWS_SHOWN)
    hint = "Press a heading to sort. Error, expected error and floor are relative to round-to-nearest's error."
    if len(shown) < len(layers):
        hint += (
            f" The {len(shown):,} of {len(layers):,} layers with the largest error relative to their output; "
            "the JSON report has all."
        )
    headings = ("layer", "shape", "bits", "group", "tokens", "rank", "error", "of output", "expected",
                "floor", "damping", "time", "notes")  # fmt: skip
    head = "".join(
        f'<th class="{"text" if heading in ("layer", "notes") else ""}"><button type="button">{heading}</button></th>'
        for heading in headings
    )
    table = _table("sortable", head, map(_layer_cells, shown))
    return _section("Every layer", hint, f'<div class="scroll">{table}</div>')


def _layer_cells(layer: LayerRecord) -> Iterable[str]:
    summed = totals([layer])
    expected, floor = summed.mean_expected_to_rtn, summed.mean_floor_to_rtn
    error, rank = layer.relative_output_error, layer.effective_rank
    figures: tuple[tuple[str, float | None], ...] = (
        (f"{layer.rows} x {layer.columns}", layer.rows * layer.columns),
        (str(layer.bits), layer.bits),
        (format_group(layer.group_size), layer.columns if layer.group_size == -1 else layer.group_size),
        (f"{layer.tokens:,}", layer.tokens),
        ("-" if rank is None else f"{rank:,}", rank),
        (format_ratio(layer.relative_to_rtn), layer.relative_to_rtn),
        (format_percent(error), error),
        (format_ratio(expected), expected),
        (format_ratio(floor), floor),
        (f"{layer.damping_used:g}", layer.damping_used),
        (format_seconds(layer.seconds), layer.seconds),
    )
    yield _cell(layer.name.removesuffix(".weight"), "text name")
    yield from (f'<td data-value="{-1 if value is None else value}">{escape(text)}</td>' for text, value in figures)
    yield _cell("; ".join((*(() if layer.built else ("not calibrated",)), *notes(summed))), "text")


def _details(report: RunReport) -> str:
    calibration, varied = report.calibration, variety(report.calibration, report.layers)
    verdicts = (
        (
            _cell(verdict.server, "text"),
            _cell(verdict.opens, f"text {verdict.opens}"),
            _cell(verdict.basis, "text"),
            _cell(remark(verdict), "text"),
        )
        for verdict in report.plan.servers
    )
    head = "".join(f'<th class="text">{heading}</th>' for heading in SERVER_HEADINGS)
    lists: dict[str, Mapping[str, object]] = {
        "Calibration": {
            "source": calibration.source,
            "windows": f"{calibration.windows:,}",
            "tokens": f"{calibration.tokens:,} of {calibration.tokens_available:,}",
            "digest of the token ids": calibration.digest,
            **({"variety": varied} if varied else {}),
        },
        "Copied as they are": {
            reason: f"{count:,} tensors, {format_bytes(size)}"
            for reason, (count, size) in untouched_by_reason(report.plan).items()
        },
        "Settings": report.settings,
        "Environment": report.environment,
    }
    sections = "".join(_section(title, "", _list(entries)) for title, entries in lists.items())
    table = _table("", head, verdicts)
    return _section("What will open it", "", f'<div class="wide">{table}</div>') + (
        f'<div class="columns">{sections}</div>'
    )


def _grids(report: RunReport) -> str:
    grids = sorted({format_grid(target.grid) for target in report.plan.targets})
    return escape(f"{', '.join(grids)}, group {format_group(report.plan.group_size)}")


def _section(title: str, note: str, body: str) -> str:
    remark = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{remark}{body}</section>"


def _table(style: str, head: str, rows: Iterable[Iterable[str]]) -> str:
    opening = f'<table class="{style}">' if style else "<table>"
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    return f"{opening}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str, style: str) -> str:
    return f'<td class="{style}">{escape(text)}</td>'


def _list(entries: Mapping[str, object]) -> str:
    items = "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(_setting(value))}</dd>" for key, value in entries.items())
    return f"<dl>{items}</dl>"


def _setting(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={item}" for key, item in value.items() if item is not None)
    return ", ".join(map(_setting, value)) or "none" if isinstance(value, (list, tuple)) else str(value)


def _asset(name: str) -> str:
    return (files("hessquant.report") / "assets" / name).read_text(encoding="utf-8")
