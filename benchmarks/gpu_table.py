"""What `gpu.py` found, as tables for docs/benchmarks-gpu.md."""

from collections.abc import Iterator, Mapping
from typing import Any


def markdown(told: Mapping[str, Any]) -> str:
    """All parts that were run, and what was not as it must be."""
    lines = [*_head(told)]
    for name, table in (("kernels", _kernels), ("solver", _solver), ("models", _models)):
        if name in told:
            broke_off = isinstance(told[name], dict) and "broke_off" in told[name]
            lines += ["", f"{name}: broke off" if broke_off or not told[name] else "", *_rows(told[name], table)]
    lines += ["", *(f"- **{fault.splitlines()[0]}**" for fault in told["faults"])]
    return "\n".join(lines)


def _rows(found: Any, table: Any) -> Iterator[str]:
    if found and not (isinstance(found, dict) and "broke_off" in found):
        yield from table(found)


def _head(told: Mapping[str, Any]) -> Iterator[str]:
    of = told["environment"]
    rates = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in told["rates"].items())
    yield (
        f"{of['device']}, driver {of['driver']}, torch {of['torch']}, Triton {of['triton']}, transformers "
        f"{of['transformers']}{' (small shapes: the times mean nothing)' if told['small'] else ''}. "
        f"Products of squares, in TFLOP/s: {rates}. {told['seconds']['all']:.0f} s in all."
    )


def _kernels(found: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Tests of the kernels on {found['device']}: {found['passed']} passed, {len(found['failed'])} failed, "
        f"{len(found['skipped'])} skipped."
    )


def _solver(found: list[dict[str, Any]]) -> Iterator[str]:
    yield "| weight | case | kernels | unlike codes, scales, zeros | loss / RTN's |"
    yield "|---|---|---|---|---|"
    for shape in found:
        for case in shape["cases"]:
            yield (
                f"| {case['rows']} x {case['columns']} | {case['case']} | {case['kernels']} | {case['unlike_codes']}, "
                f"{case['unlike_scales']}, {case['unlike_zeros']} | {case['loss_over_rtn']:.4f} |"
            )
    yield ""
    yield "| weight | stage | ms | limit, ms | share of it | peak memory |"
    yield "|---|---|---|---|---|---|"
    for shape in found:
        for stage in shape["stages"]:
            yield (
                f"| {shape['rows']} x {shape['columns']} | {stage['stage']} ({stage['dtype']}) "
                f"| {stage['milliseconds']:.2f} | {stage['limit_milliseconds']:.2f} | {stage['share_of_limit']:.1%} "
                f"| {_bytes(stage['peak_bytes'])} |"
            )
    yield ""
    for shape in found:
        yield (
            f"- {shape['rows']} x {shape['columns']}, {shape['tokens']} tokens: loss {shape['loss']:.6g}, on the CPU "
            f"{shape['loss_on_the_cpu']:.6g} ({shape['difference_of_losses']:.2%} apart)."
        )


def _models(found: list[dict[str, Any]]) -> Iterator[str]:
    yield "| block | run | wall s | by stage, s | solutions, s | peak device memory | planned | loss / RTN's |"
    yield "|---|---|---|---|---|---|---|---|"
    for model in found:
        for name in ("first", "again"):
            run = model[name]
            stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in run["seconds_by_stage"].items())
            planned = ", ".join(f"{key} {_bytes(value)}" for key, value in run["planned"].items())
            yield (
                f"| {model['model']}, {model['windows']} x {model['window_length']} | {name} | {run['seconds']:.2f} "
                f"| {stages} | {run['seconds_of_solutions']:.2f} | {_bytes(run['peak_bytes'])} | {planned} "
                f"| {run['loss_over_rtn']:.4f} |"
            )
    yield ""
    for model in found:
        limits = ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in model["limit_seconds"].items())
        same = "the same bytes twice" if not model["unlike_files"] else "OTHER BYTES the second time"
        yield f"- {model['model']}: {same} ({model['files']} files); at the measured rates, in ms: {limits}."


def _bytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e9:.3g} GB"
