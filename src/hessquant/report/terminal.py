"""Records as tables for the terminal; readable at 80 columns and without colour."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hessquant.records import Plan, Target
from hessquant.report.figures import (
    by_kind,
    kind,
    kind_labels,
    memory_sentences,
    notes,
    reach,
    relative_output_error,
    remark,
    totals,
    variety,
    worst,
)
from hessquant.report.html import PAGE_NAME
from hessquant.report.json_report import REPORT_NAME
from hessquant.report.units import (
    format_bytes,
    format_grid,
    format_group,
    format_percent,
    format_range,
    format_ratio,
    format_seconds,
)
from hessquant.results import Evaluation, ExportReport, InspectedWeight, Inspection, LayerRecord, RunReport

_WORST_SHOWN = 5
_LABEL_WIDTH = 26
_SENTENCES_SHOWN = 20
_OPENS_STYLES = {"yes": "green", "no": "red", "unknown": "yellow"}


def render_plan(plan: Plan) -> RenderableType:
    """Tables of what will be quantized, what will not and why, and which servers will open the result."""
    return _page(
        _plan_facts(plan),
        None if plan.fits else _sentences("This machine cannot hold it", memory_sentences(plan), "yellow"),
        _weights_table(plan.targets) if plan.targets else None,
        _untouched_table(plan) if plan.untouched else None,
        _servers_table(plan) if plan.servers else None,
    )


def render_run(report: RunReport, out: Path) -> RenderableType:
    """Tables of what a run did: error per kind of weight, worst layers, what was degraded, what it cost."""
    return _page(
        _kinds_table(report.layers),
        _kind_notes(report.layers),
        _worst_table(report.layers),
        _run_facts(report, out),
        _sentences("Degraded", report.degraded, "yellow") if report.degraded else None,
    )


def render_evaluation(evaluation: Evaluation) -> RenderableType:
    """Table of a model's perplexity, beside its base model's where there is one."""
    compared = evaluation.comparison
    table = _table("Evaluation")
    table.add_column("model", overflow="fold")
    for heading in ("perplexity", "KL divergence", "same top token"):
        table.add_column(heading, justify="right", no_wrap=True)
    if compared is not None:
        _row(table, compared.base, f"{compared.base_perplexity:.4f}", "base", "base")
        difference = (f"{compared.kl_divergence:.5f} nats", f"{100 * compared.top1_agreement:.2f} %")
    else:
        difference = ("-", "-")
    _row(table, evaluation.model, f"{evaluation.perplexity:.4f}", *difference)
    recipe = (
        f"{evaluation.tokens:,} predicted tokens in {evaluation.windows:,} windows of "
        f"{evaluation.window_length:,}, float32, text: {evaluation.text}; {evaluation.nll:.5f} nats per token"
    )
    return _page(table, Text(recipe, style="dim"))


def render_export(report: ExportReport, out: Path) -> RenderableType:
    """Table of what an export did."""
    return _page(
        _facts(
            ("Output", str(out)),
            ("Format", f"{report.format}, from {report.source_format}"),
            ("Verified", f"{report.verified_tensors:,} weights re-read, all equal to the checkpoint's"),
            ("Size", format_bytes(report.output_bytes)),
            ("Time", format_seconds(report.seconds)),
        )
    )


def render_inspection(inspection: Inspection) -> RenderableType:
    """Tables of what a checkpoint holds, and what is wrong with it."""
    copied = sum(tensor.bytes for tensor in inspection.untouched)
    facts = _facts(
        ("Checkpoint", inspection.directory),
        ("Format", inspection.format),
        ("Quantized", f"{len(inspection.weights):,} weights, {round(inspection.bits_per_weight, 4):g} bits per weight"),
        ("Other tensors", f"{len(inspection.untouched):,}, {format_bytes(copied)}"),
        ("Size", format_bytes(inspection.total_bytes)),
    )
    table = _weights_table(inspection.weights)
    verdict = _sentences("Faults", inspection.faults, "red") if inspection.faults else Text("No faults found.")
    unchecked = Text(f"Not compared with the model that its config names: {inspection.unchecked}")
    return _page(facts, table if inspection.weights else None, verdict, unchecked if inspection.unchecked else None)


def _plan_facts(plan: Plan) -> Table:
    blocks = " + ".join(f"{count} x {name}" for name, count in Counter(map(kind, plan.blocks)).items())
    smaller = plan.output_bytes / plan.source_bytes if plan.source_bytes else 1.0
    grids = ", ".join(sorted({format_grid(target.grid) for target in plan.targets}))
    groups = ", ".join(map(format_group, sorted({target.grid.group_size for target in plan.targets})))
    size = f"{format_bytes(plan.source_bytes)} -> {format_bytes(plan.output_bytes)} ({format_percent(smaller)})"
    return _facts(
        ("Model", f"{plan.source} ({plan.architecture})"),
        ("Blocks", blocks),
        *([("Run as one", f"the whole model is in memory, since {plan.whole}")] if plan.whole else []),
        ("Targets", f"{len(plan.targets):,} weights, {grids}, group {groups}"),
        ("Bits per weight", f"{round(plan.bits_per_weight, 4):g}"),
        ("Size", size),
        (
            "Left in 16 bit",
            f"{format_percent(plan.unquantized_share)} of the weight bytes; "
            f"{format_percent(plan.unquantized_matrices)} without embeddings and head",
        ),
        *([("Windows", _window(plan))] if plan.window_length is not None else []),
        ("Memory", _memory(plan)),
        ("Tensor parallel", reach(plan.tensor_parallel, plan.tensor_parallel_limit)),
    )


def _window(plan: Plan) -> str:
    context = f", of a context of {plan.context:,}" if plan.context is not None else ""
    return f"up to {plan.window_length:,} tokens{context}"


def _memory(plan: Plan) -> str:
    about = f"about {format_bytes(plan.memory_bytes)}"
    return f"{about} of the machine's {format_bytes(plan.machine_memory)}" if plan.machine_memory else about


def _weights_table(weights: Iterable[Target | InspectedWeight]) -> Table:
    """Weights by name, shape and grid, like ones counted instead of listed."""
    counted = Counter((kind(weight.name), weight.rows, weight.columns, weight.grid) for weight in weights)
    labels = kind_labels(name for name, *_ in counted)
    table = _table("Quantized weights", footer=True)
    table.add_column("weight", "total", overflow="fold")
    for heading in ("rows x columns", "grid", "group"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("count", f"{sum(counted.values()):,}", justify="right", no_wrap=True)
    for (name, rows, columns, grid), count in counted.items():
        _row(table, labels[name], f"{rows} x {columns}", format_grid(grid), format_group(grid.group_size), f"{count:,}")
    return table


def _untouched_table(plan: Plan) -> Table:
    grouped: dict[str, list[int]] = defaultdict(list)
    for tensor in plan.untouched:
        grouped[tensor.reason].append(tensor.bytes)
    sizes = [size for group in grouped.values() for size in group]
    table = _table("Copied as they are", footer=True)
    table.add_column("why", "total", overflow="fold")
    table.add_column("count", f"{len(sizes):,}", justify="right", no_wrap=True)
    table.add_column("bytes", format_bytes(sum(sizes)), justify="right", no_wrap=True)
    for reason, group in grouped.items():
        _row(table, reason, f"{len(group):,}", format_bytes(sum(group)))
    return table


def _servers_table(plan: Plan) -> Table:
    table = _table("What will open it")
    table.add_column("client", no_wrap=True)
    table.add_column("opens", no_wrap=True)
    table.add_column("known by", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for verdict in plan.servers:
        opens = Text(verdict.opens, style=_OPENS_STYLES[verdict.opens])
        table.add_row(Text(verdict.server), opens, Text(verdict.basis), Text(remark(verdict)))
    return table


def _kinds_table(layers: Sequence[LayerRecord]) -> Table:
    kinds = by_kind(layers)
    labels = kind_labels(kinds)
    overall = totals(layers)
    table = _table("Error per kind of weight (RTN = round to nearest)", footer=True)
    longest = max(map(len, labels.values()), default=0)
    table.add_column("weight", "total", overflow="fold", min_width=min(longest, _LABEL_WIDTH))
    table.add_column("count", f"{len(layers):,}", justify="right", no_wrap=True)
    table.add_column("error\n/ RTN's", format_ratio(overall.mean_relative_to_rtn), justify="right", no_wrap=True)
    error = format_percent(overall.mean_relative_output_error)
    table.add_column("relative\nto output", error, justify="right", no_wrap=True)
    table.add_column("damping", justify="right", overflow="fold")
    table.add_column("tokens", justify="right", overflow="fold")
    for name, group in kinds.items():
        summed = totals(group)
        _row(
            table,
            labels[name],
            f"{len(group):,}",
            format_ratio(summed.mean_relative_to_rtn),
            format_percent(summed.mean_relative_output_error),
            format_range([layer.damping_used for layer in group], "{:g}".format),
            format_range([layer.tokens for layer in group], "{:,}".format),
        )
    return table


def _kind_notes(layers: Sequence[LayerRecord]) -> RenderableType | None:
    kinds = by_kind(layers)
    labels = kind_labels(kinds)
    noted = {labels[name]: "; ".join(notes(totals(group))) for name, group in kinds.items()}
    facts = [(label, note) for label, note in noted.items() if note]
    return _facts(*facts) if facts else None


def _worst_table(layers: Sequence[LayerRecord]) -> Table:
    shown = worst(layers, _WORST_SHOWN)
    table = _table(f"The {len(shown)} layers with the largest error relative to their output")
    table.add_column("layer", overflow="fold")
    table.add_column("error / RTN's", justify="right", no_wrap=True)
    table.add_column("relative to output", justify="right", no_wrap=True)
    for layer in shown:
        error = format_percent(relative_output_error(layer))
        _row(table, layer.name.removesuffix(".weight"), format_ratio(layer.relative_to_rtn), error)
    return table


def _run_facts(report: RunReport, out: Path) -> Table:
    summed = totals(report.layers)
    calibration = report.calibration
    varied = variety(calibration, report.layers)
    bounds = (
        f"{format_ratio(summed.mean_relative_to_rtn)} of RTN's; "
        f"{format_ratio(summed.mean_expected_to_rtn)} was expected, no order beats "
        f"{format_ratio(summed.mean_floor_to_rtn)}"
    )
    return _facts(
        ("Mean error", bounds),
        ("Calibration", f"{calibration.tokens:,} tokens in {calibration.windows:,} windows of {calibration.source}"),
        *((("Variety", varied),) if varied else ()),
        ("Verified", f"{report.verified_tensors:,} of {len(report.layers):,} weights re-read and decoded exactly"),
        ("Size", f"{format_bytes(report.plan.source_bytes)} -> {format_bytes(report.output_bytes)}"),
        ("Time", f"{format_seconds(report.seconds)}; CPU time {format_seconds(report.cpu_seconds)}"),
        ("Peak memory", format_bytes(report.peak_memory_bytes)),
        ("Forward passes", f"{report.forwards_per_block:g} per block and window"),
        *(
            (("Resumed", f"{report.resumed_blocks} blocks were finished by an earlier run"),)
            if report.resumed_blocks
            else ()
        ),
        *(
            (("Activations", f"{format_bytes(report.mapped_activation_bytes)} were kept in files"),)
            if report.mapped_activation_bytes
            else ()
        ),
        ("Checkpoint", str(out)),
        ("Report", str(out / REPORT_NAME)),
        ("Page", str(out / PAGE_NAME)),
    )


def _page(*parts: RenderableType | None) -> Group:
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts if part is not None))


def _table(title: str, footer: bool = False) -> Table:
    return Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE,
        show_edge=False,
        show_footer=footer,
        padding=(0, 1, 0, 0),
        header_style="dim",
    )


def _row(table: Table, *cells: str) -> None:
    """Add cells that are shown as they are: names from a checkpoint may look like markup."""
    table.add_row(*(Text(cell) for cell in cells))


def _facts(*facts: tuple[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts:
        _row(table, name, fact)
    return table


def _sentences(title: str, sentences: Sequence[str], style: str) -> Group:
    lines = [f"- {sentence}" for sentence in sentences[:_SENTENCES_SHOWN]]
    if len(sentences) > _SENTENCES_SHOWN:
        lines.append(f"- and {len(sentences) - _SENTENCES_SHOWN:,} more; --json and the report have all of them")
    return Group(Text(f"{title}:", style=f"bold {style}"), *(Text(line, style=style) for line in lines))
