"""Records as tables for the terminal; readable at 80 columns and without colour."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from hessquant.records import Plan, RunCost, Target
from hessquant.report.figures import (
    SERVER_HEADINGS,
    allocation_sentence,
    kind_among,
    kind_labels,
    kind_of,
    kinds_of,
    load_sentences,
    memory_sentences,
    notes,
    reach,
    remark,
    totals,
    unbuilt_sentence,
    untouched_by_reason,
    variety,
    worst,
)
from hessquant.report.html import PAGE_NAME
from hessquant.report.json_report import REPORT_NAME
from hessquant.report.side_by_side import side_by_side
from hessquant.report.units import (
    format_bytes,
    format_grid,
    format_group,
    format_measured,
    format_percent,
    format_range,
    format_ratio,
    format_seconds,
)
from hessquant.results import Evaluation, ExportReport, InspectedWeight, Inspection, LayerRecord, RunReport

_WORST_SHOWN = 5
_LABEL_WIDTH = 26
_SENTENCES_SHOWN = 20
_ARROWS = {True: " ↑", False: " ↓", None: ""}
_OPENS_STYLES = {"yes": "green", "no": "red", "unknown": "yellow"}


def render_plan(plan: Plan) -> RenderableType:
    """Tables of what will be quantized, what will not and why, and which servers will open the result."""
    few = () if plan.expert_load is None else load_sentences(plan.expert_load)
    return _page(
        _plan_facts(plan),
        None if plan.cost is None else _cost_facts(plan.cost),
        None if plan.fits else _sentences("This machine cannot hold it", memory_sentences(plan), "yellow"),
        _sentences("Few tokens per expert", few, "yellow") if few else None,
        _weights_table(plan.targets) if plan.targets else None,
        _untouched_table(plan) if plan.untouched else None,
        _servers_table(plan) if plan.servers else None,
    )


def render_run(report: RunReport, out: Path) -> RenderableType:
    """Tables of what a run did: error per kind of weight, worst layers, what was degraded, what it cost."""
    return _page(
        *_kinds_tables(report.layers),
        _worst_table(report.layers),
        _run_facts(report, out),
        _sentences("Degraded", report.degraded, "yellow") if report.degraded else None,
    )


def render_evaluation(evaluation: Evaluation) -> RenderableType:
    """Tables of a model's perplexity, beside its base model's where there is one, and of what else was tried."""
    base = evaluation.comparison
    rows = [(evaluation.model, format_measured(evaluation.perplexity, evaluation.perplexity_error, 4), "-", "-")]
    if base is not None:
        divergence = f"{format_measured(base.kl_divergence, base.kl_error, 5)} nats"
        top1_error = None if base.top1_error is None else 100 * base.top1_error
        difference = divergence, f"{format_measured(100 * base.top1_agreement, top1_error, 2)} %"
        base_perplexity = format_measured(base.base_perplexity, base.base_perplexity_error, 4)
        rows = [(base.base, base_perplexity, "base", "base"), (*rows[0][:2], *difference)]
    columns = _names("model"), _figures("perplexity"), _figures("KL divergence"), _figures("same top token")
    whole = {evaluation.model: evaluation.whole, **({} if base is None else {base.base: base.whole})}
    notes = [Text(f"All of {name} was in memory, since {why}", style="dim") for name, why in whole.items() if why]
    return _page(
        _table("Evaluation", columns, rows),
        Text("\n".join(_recipe(evaluation)), style="dim"),
        *notes,
        _tasks_table(evaluation) if evaluation.tasks else None,
        side_by_side(evaluation) if evaluation.continuations else None,
    )


def _recipe(evaluation: Evaluation) -> Iterator[str]:
    """What was measured, and how sure it is."""
    base, windows = evaluation.comparison, len(evaluation.per_window)
    if base is not None and base.perplexity_ratio is not None:
        ratio = format_measured(base.perplexity_ratio, base.ratio_error, 4)
        yield f"perplexity is {ratio} times the base's, on the same windows"
    yield (
        f"{evaluation.tokens:,} predicted tokens in {evaluation.windows:,} windows of "
        f"{evaluation.window_length:,}, float32, text: {evaluation.text}; {evaluation.nll:.5f} nats per token"
    )
    if evaluation.nll_error is not None:
        yield f"± is the standard error over {windows:,} windows"
    elif windows == 1:
        yield "no errors, as there is one window alone"


def _tasks_table(evaluation: Evaluation) -> Table:
    """A row per metric of a task."""
    base = evaluation.comparison
    models = [("base", "base_score", "base_error")] if base is not None else []
    models.append(("model", "score", "error"))
    columns = (
        _names("task"),
        _names("metric"),
        *map(_figures, ("shots", "questions", *(title for title, _, _ in models))),
    )
    rows = (
        (
            score.task,
            score.metric + ("" if score.filter == "none" else f" ({score.filter})") + _ARROWS[score.higher_is_better],
            *("-" if count is None else f"{count:,}" for count in (score.shots, score.samples)),
            *(format_measured(getattr(score, value), getattr(score, error), 4) for _, value, error in models),
        )
        for score in evaluation.tasks
    )
    return _table("Tasks of lm-eval, with its standard errors", columns, rows)


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
    return _page(
        facts,
        _weights_table(inspection.weights) if inspection.weights else None,
        _sentences("Faults", inspection.faults, "red") if inspection.faults else Text("No faults found."),
        Text(f"Not compared with the model that its config names: {inspection.unchecked}")
        if inspection.unchecked
        else None,
    )


def _plan_facts(plan: Plan) -> Table:
    smaller = plan.output_bytes / plan.source_bytes if plan.source_bytes else 1.0
    grids = ", ".join(sorted({format_grid(target.grid) for target in plan.targets}))
    groups = ", ".join(map(format_group, sorted({target.grid.group_size for target in plan.targets})))
    context = f", of a context of {plan.context:,}" if plan.context is not None else ""
    in_bits = " in 16 bit" if plan.source_form else ""
    machine = f" of the machine's {format_bytes(plan.machine_memory)}" if plan.machine_memory else ""
    experts, on_device = None, None
    if plan.expert_load is not None:
        load = plan.expert_load
        experts = f"{load.chosen} of {load.experts:,} per token, each with about {load.tokens:,} calibration tokens"
    if plan.device_memory_bytes:
        has = f" of its {format_bytes(plan.device_memory)}" if plan.device_memory else ""
        on_device = f"about {format_bytes(plan.device_memory_bytes)}{has}"
    return _facts(
        ("Model", f"{plan.source} ({plan.architecture})"),
        ("Source", plan.source_form or None),
        ("Dropped", _dropped(plan) or None),
        ("Blocks", " + ".join(f"{count} x {name}" for name, count in Counter(map(kind_of, plan.blocks)).items())),
        ("Run as one", f"the whole model is in memory, since {plan.whole}" if plan.whole else None),
        ("Targets", f"{len(plan.targets):,} weights, {grids}, group {groups}"),
        ("Not calibrated", unbuilt_sentence(plan) or None),
        ("Bits per weight", f"{round(plan.bits_per_weight, 4):g}"),
        ("Expected loss", None if plan.allocation is None else allocation_sentence(plan.allocation)),
        (
            "Size",
            f"{format_bytes(plan.source_bytes)}{in_bits} -> {format_bytes(plan.output_bytes)} "
            f"({format_percent(smaller)})",
        ),
        (
            "Left in 16 bit",
            f"{format_percent(plan.unquantized_share)} of the weight bytes; "
            f"{format_percent(plan.unquantized_matrices)} without embeddings and head",
        ),
        ("Windows", None if plan.window_length is None else f"up to {plan.window_length:,} tokens{context}"),
        ("Experts", experts),
        ("Runs on", plan.place or None),
        ("Memory", f"about {format_bytes(plan.memory_bytes)}{machine}"),
        ("On the device", on_device),
        ("Tensor parallel", reach(plan.tensor_parallel, plan.tensor_parallel_limit)),
    )


def _cost_facts(cost: RunCost) -> Table:
    """What a run over several processes takes, and what bounds it."""
    largest, each = cost.largest, "" if cost.processes == 1 else " each"
    made = "an estimate" if cost.measured else "an estimate from assumed speeds, which nobody measured"
    several = cost.processes > 1
    return _facts(
        ("Processes", f"{cost.processes:,}, each as fast as {cost.rates}"),
        ("Time", f"about {format_seconds(cost.seconds)}: {made}"),
        ("Most of it", f"{largest.name}, {format_percent(largest.seconds / cost.seconds)}"),
        (
            "Speed-up",
            f"{cost.speed_up:.1f} times one process, which takes {format_seconds(cost.seconds_of_one)}; "
            f"no number of them makes it {cost.limit:.1f} times"
            if several
            else f"no number of processes makes it {cost.limit:.1f} times as fast",
        ),
        ("Exchanged", f"each receives up to {format_bytes(cost.received_bytes)} from the others" if several else None),
        ("Read", f"{format_bytes(cost.read_bytes)}{each}, by the first {format_bytes(cost.first_read_bytes)}"),
        ("Memory", f"about {format_bytes(cost.memory_bytes)}{each}"),
    )


def _dropped(plan: Plan) -> str:
    counted = Counter(tensor.reason for tensor in plan.dropped)
    return "; ".join(f"{count:,} tensors: {reason}" for reason, count in counted.items())


def _weights_table(weights: Iterable[Target | InspectedWeight]) -> Table:
    """Weights by name, shape and grid, like ones counted instead of listed."""
    counted = Counter((kind_among(weight), weight.rows, weight.columns, weight.grid) for weight in weights)
    labels = kind_labels(name for name, *_ in counted)
    columns = (
        _names("weight", "total"),
        *map(_figures, ("rows x columns", "grid", "group")),
        _figures("count", f"{counted.total():,}"),
    )
    rows = (
        (
            labels[name],
            f"{rows} x {columns}",
            "-" if grid is None else format_grid(grid),
            "-" if grid is None else format_group(grid.group_size),
            f"{count:,}",
        )
        for (name, rows, columns, grid), count in counted.items()
    )
    return _table("Quantized weights", columns, rows)


def _untouched_table(plan: Plan) -> Table:
    total = sum(tensor.bytes for tensor in plan.untouched)
    columns = (
        _names("why", "total"),
        _figures("count", f"{len(plan.untouched):,}"),
        _figures("bytes", format_bytes(total)),
    )
    reasons = untouched_by_reason(plan)
    rows = ((reason, f"{count:,}", format_bytes(size)) for reason, (count, size) in reasons.items())
    return _table("Copied as they are", columns, rows)


def _servers_table(plan: Plan) -> Table:
    *short, reason = SERVER_HEADINGS
    columns = *(Column(heading, no_wrap=True) for heading in short), _names(reason)
    rows = (
        (verdict.server, Text(verdict.opens, style=_OPENS_STYLES[verdict.opens]), verdict.basis, remark(verdict))
        for verdict in plan.servers
    )
    return _table("What will open it", columns, rows)


def _kinds_tables(layers: Sequence[LayerRecord]) -> Iterator[Table]:
    """What became of each kind of weight, and what a reader should not overlook."""
    kinds, overall = kinds_of(layers).values(), totals(layers)
    longest = max((len(label) for label, _, _ in kinds), default=0)
    columns = (
        _names("weight", "total", min_width=min(longest, _LABEL_WIDTH)),
        _figures("count", f"{len(layers):,}"),
        _figures("error\n/ RTN's", format_ratio(overall.mean_relative_to_rtn)),
        _figures("relative\nto output", format_percent(overall.mean_relative_output_error)),
        _names("damping", justify="right"),
        _names("tokens", justify="right"),
    )
    rows = (
        (
            label,
            f"{len(group):,}",
            format_ratio(summed.mean_relative_to_rtn),
            format_percent(summed.mean_relative_output_error),
            format_range([layer.damping_used for layer in group], "{:g}".format),
            format_range([layer.tokens for layer in group], "{:,}".format),
        )
        for label, group, summed in kinds
    )
    yield _table("Error per kind of weight (RTN = round to nearest)", columns, rows)
    noted = [(label, "; ".join(notes(summed))) for label, _, summed in kinds if notes(summed)]
    if noted:
        yield _facts(*noted)


def _worst_table(layers: Sequence[LayerRecord]) -> Table:
    shown = worst(layers, _WORST_SHOWN)
    columns = _names("layer"), _figures("error / RTN's"), _figures("relative to output")
    rows = (
        (
            layer.name.removesuffix(".weight"),
            format_ratio(layer.relative_to_rtn),
            format_percent(layer.relative_output_error),
        )
        for layer in shown
    )
    return _table(f"The {len(shown)} layers with the largest error relative to their output", columns, rows)


def _run_facts(report: RunReport, out: Path) -> Table:
    summed, calibration = totals(report.layers), report.calibration
    resumed, mapped = report.resumed_blocks, report.mapped_activation_bytes
    bounds = (
        f"{format_ratio(summed.mean_relative_to_rtn)} of RTN's; "
        f"{format_ratio(summed.mean_expected_to_rtn)} was expected, no order beats "
        f"{format_ratio(summed.mean_floor_to_rtn)}"
    )
    return _facts(
        ("Mean error", bounds),
        ("Calibration", f"{calibration.tokens:,} tokens in {calibration.windows:,} windows of {calibration.source}"),
        ("Variety", variety(calibration, report.layers) or None),
        ("Verified", f"{report.verified_tensors:,} of {len(report.layers):,} weights re-read and decoded exactly"),
        ("Size", f"{format_bytes(report.plan.source_bytes)} -> {format_bytes(report.output_bytes)}"),
        ("Time", f"{format_seconds(report.seconds)}; CPU time {format_seconds(report.cpu_seconds)}"),
        ("Peak memory", format_bytes(report.peak_memory_bytes)),
        ("Forward passes", f"{report.forwards_per_block:g} per block and window"),
        ("Resumed", f"{resumed} blocks were finished by an earlier run" if resumed else None),
        ("Activations", f"{format_bytes(mapped)} were kept in files" if mapped else None),
        ("Held less", "; ".join(report.retreats) or None),
        ("Checkpoint", str(out)),
        ("Report", str(out / REPORT_NAME)),
        ("Page", str(out / PAGE_NAME)),
    )


def _page(*parts: RenderableType | None) -> Group:
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts if part is not None))


def _names(heading: str, total: str = "", **form: Any) -> Column:
    """A column whose cells may be long."""
    return Column(heading, total, overflow="fold", **form)


def _figures(heading: str, total: str = "") -> Column:
    return Column(heading, total, justify="right", no_wrap=True)


def _table(title: str, columns: Iterable[Column], rows: Iterable[Iterable[str | Text]]) -> Table:
    columns = tuple(columns)
    table = Table(
        *columns,
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE,
        show_edge=False,
        show_footer=any(column.footer for column in columns),
        padding=(0, 1, 0, 0),
        header_style="dim",
    )
    return _filled(table, rows)


def _facts(*facts: tuple[str, str | None]) -> Table:
    """What is known by name; None = there is nothing to say."""
    table = Table.grid(Column(style="dim", no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    return _filled(table, ((name, fact) for name, fact in facts if fact is not None))


def _filled(table: Table, rows: Iterable[Iterable[str | Text]]) -> Table:
    """Cells are shown as they are: names from a checkpoint may look like markup."""
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def _sentences(title: str, sentences: Sequence[str], style: str) -> Group:
    lines = [f"- {sentence}" for sentence in sentences[:_SENTENCES_SHOWN]]
    if len(sentences) > _SENTENCES_SHOWN:
        lines.append(f"- and {len(sentences) - _SENTENCES_SHOWN:,} more; --json and the report have all of them")
    return Group(Text(f"{title}:", style=f"bold {style}"), *(Text(line, style=style) for line in lines))
