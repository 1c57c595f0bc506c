"""The commands: parse, make the config, run the pipeline, give an exit code.

Everything that a command needs from torch is imported inside it, before its work begins: `--help` should not wait for
that, and a signal that comes while libraries are being imported ends the process at once.
"""

import sys
import traceback
from contextlib import redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console, RenderableType
from rich.text import Text

import hessquant
from hessquant.config import Config, Format
from hessquant.errors import HessquantError, RefusedError
from hessquant.interrupts import INTERRUPTED, Interrupted, Interrupts
from hessquant.options import Json, Model, OnceEach, Serve, ShardSize, TrustRemoteCode, parse_size, takes_config
from hessquant.records import Evaluation, ExportReport, Inspection, Plan, RunReport
from hessquant.report.json_report import error_json, to_json
from hessquant.report.progress import make_progress
from hessquant.report.terminal import render_evaluation, render_export, render_inspection, render_plan, render_run
from hessquant.run.names import count_finished

_DONE, _REFUSED, _FAILED, _DEGRADED = 0, 2, 3, 4

_INTERRUPTS: ContextVar[Interrupts] = ContextVar("interrupts")

# Typer does not export the base of its usage errors in every release that we allow.
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__base__)

app = typer.Typer(
    name="hessquant",
    help="Quantize the weights of a transformer by GPTQ, to a checkpoint that servers open.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def run(arguments: list[str], interrupts: Interrupts, as_json: bool) -> int:
    """Run one command and give its exit code; says what went wrong.

    Args:
        arguments: Of the command line.
        interrupts: What becomes of signals meanwhile.
        as_json: Whether standard output is to hold one JSON object.
    """
    interrupts.error_json = error_json
    _INTERRUPTS.set(interrupts)
    try:
        # Commands return their exit code; without standalone mode typer passes it on, and errors too.
        code = int(app(arguments, prog_name="hessquant", standalone_mode=False) or _DONE)
    except BaseException as error:
        if interrupts.number is None and not isinstance(error, (Interrupted, KeyboardInterrupt)):
            return _give_up_over(error, interrupts)
        return _give_up_interrupted(interrupts)
    # Typer itself may catch Ctrl-C, and then hands back its exit code.
    if interrupts.number is not None or code == INTERRUPTED:
        return _give_up_interrupted(interrupts)
    return code


def _give_up_over(error: BaseException, interrupts: Interrupts) -> int:
    """Tell of an error; its exit code."""
    match error:
        case _UsageError():
            error.show()
            return _give_up(interrupts, type(error).__name__, error.format_message(), _REFUSED, say="")
        case HessquantError():
            verb = "refused" if isinstance(error, RefusedError) else "failed"
            say = f"{verb}: {error}"
            return _give_up(interrupts, type(error).__name__, str(error), error.exit_code, say=say)
        case Exception():
            traceback.print_exception(error)
            say = "failed: this is a bug in Hessquant; please report it with the traceback above and the command"
            return _give_up(interrupts, type(error).__name__, str(error), _FAILED, say=say)
    raise error


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=lambda asked: _print_version(asked), help="Print the version."
        ),
    ] = False,
) -> None:
    """Quantize the weights of a transformer by GPTQ, to a checkpoint that servers open."""


@app.command(cls=OnceEach)
@takes_config
def plan(
    model: Model,
    config: Config,
    calibration: Annotated[
        str, typer.Option(metavar="SOURCE", help="As quantize takes it; of a text only the beginning is read.")
    ] = "builtin",
    as_json: Json = False,
) -> int:
    """Show what quantize would do, without reading weights."""
    with redirect_stdout(sys.stderr):
        from hessquant import pipeline

    with _interrupts(), redirect_stdout(sys.stderr):
        planned = pipeline.make_plan(model, config, calibration=calibration)
    _say_unknown(planned, config)
    _show(planned, render_plan(planned), as_json)
    return _DONE


@app.command(cls=OnceEach)
@takes_config
def quantize(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory that will hold the result.")],
    config: Config,
    calibration: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="Calibration text: builtin, a .txt or .jsonl file, or hub:ID, with :CONFIG :SPLIT :COLUMN after it.",
        ),
    ] = "builtin",
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where finished blocks are kept. [default: OUT.run]")
    ] = None,
    keep_run: Annotated[bool, typer.Option("--keep-run", help="Leave them there when the run has ended well.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 4 when anything was degraded.")] = False,
    as_json: Json = False,
) -> int:
    """Quantize MODEL and write the checkpoint and its report to OUT."""
    tables = Console(file=sys.stderr if as_json else sys.stdout)
    kept_in = run_dir or out.with_name(f"{out.name}.run")
    _interrupts().describe = lambda: _how_to_go_on(kept_in, out)
    with redirect_stdout(sys.stderr):
        from hessquant import pipeline

    with _interrupts(), redirect_stdout(sys.stderr), make_progress(Console(stderr=True)) as progress:
        report = pipeline.quantize(
            model,
            out,
            config,
            calibration=calibration,
            run_dir=kept_in,
            keep_run=keep_run,
            progress=progress,
            on_plan=lambda planned: _show_plan(planned, config, tables),
        )
    _show(report, render_run(report, out), as_json)
    if strict and report.degraded:
        _say(f"degraded, and --strict was asked for: {len(report.degraded)} things, first: {report.degraded[0]}")
        return _DEGRADED
    return _DONE


@app.command(cls=OnceEach)
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Quantized checkpoint, of any writer.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory that will hold the result.")],
    format: Annotated[Format, typer.Option(help="On-disk dialect of the result.", show_default=False)],
    serve: Serve = None,
    shard_size: ShardSize = "4GB",
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> int:
    """Write a quantized checkpoint in another format, without quantizing again."""
    tables = Console(file=sys.stderr if as_json else sys.stdout)
    config = Config(
        format=format,
        serve=tuple(serve or ()),
        shard_bytes=parse_size("shard_size", shard_size),
        trust_remote_code=trust_remote_code,
    )
    with redirect_stdout(sys.stderr):
        from hessquant import pipeline

    with _interrupts(), redirect_stdout(sys.stderr), make_progress(Console(stderr=True)) as progress:
        report = pipeline.export(
            checkpoint,
            out,
            config,
            progress=progress,
            on_plan=lambda planned: _show_plan(planned, config, tables),
        )
    _show(report, render_export(report, out), as_json)
    return _DONE


@app.command(cls=OnceEach)
def evaluate(
    model: Model,
    against: Annotated[
        str | None, typer.Option(metavar="BASE", help="Compare with this model on the same tokens.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="Text to evaluate on; the builtin held-out text by default.")
    ] = None,
    num_windows: Annotated[int | None, typer.Option(min=1, help="Windows to use; all by default.")] = None,
    window_length: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens per window. [default: the smaller of 2048 and the context of both models]"),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> int:
    """Measure MODEL's perplexity, and its distance from BASE."""
    with redirect_stdout(sys.stderr):
        from hessquant import pipeline

    with _interrupts(), redirect_stdout(sys.stderr), make_progress(Console(stderr=True)) as progress:
        evaluation = pipeline.evaluate(
            model,
            against=against,
            text=text,
            num_windows=num_windows,
            window_length=window_length,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    _show(evaluation, render_evaluation(evaluation), as_json)
    return _DONE


@app.command(cls=OnceEach)
def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint directory.")],
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> int:
    """Show what a checkpoint holds and what is wrong with it."""
    with redirect_stdout(sys.stderr):
        from hessquant import pipeline

    with _interrupts(), redirect_stdout(sys.stderr):
        inspection = pipeline.inspect(directory, trust_remote_code=trust_remote_code)
    _show(inspection, render_inspection(inspection), as_json)
    return _FAILED if inspection.faults else _DONE


def _interrupts() -> Interrupts:
    """What becomes of signals while this command runs; inside it as a context, its work is done."""
    return _INTERRUPTS.get()


def _show(
    record: Plan | RunReport | ExportReport | Evaluation | Inspection, table: RenderableType, as_json: bool
) -> None:
    if as_json:
        told = to_json(record)
        _interrupts().reported = True
        typer.echo(told)
    else:
        Console().print(table)


def _show_plan(planned: Plan, config: Config, tables: Console) -> None:
    tables.print(render_plan(planned))
    _say_unknown(planned, config)


def _say_unknown(planned: Plan, config: Config) -> None:
    """What `--serve` asked for and nobody knows: no reason to refuse, and none to keep quiet."""
    for verdict in planned.servers:
        if verdict.opens == "unknown" and verdict.is_named(config.serve):
            _say(f"--serve: whether {verdict.server} opens this is not known: {verdict.reason}")


def _give_up(interrupts: Interrupts, kind: str, message: str, code: int, say: str) -> int:
    if say:
        _say(say)
    if not interrupts.reported:
        interrupts.reported = True
        typer.echo(error_json(kind, message, code))
    return code


def _give_up_interrupted(interrupts: Interrupts) -> int:
    if interrupts.told():
        return interrupts.code
    message = interrupts.describe()
    return _give_up(interrupts, "KeyboardInterrupt", message, interrupts.code, say=message)


def _how_to_go_on(run_dir: Path, out: Path) -> str:
    """What an interrupted `quantize` leaves."""
    if any((out / name).is_file() for name in ("config.json", "model.gguf")):
        return f"interrupted; {out} is complete"
    kept = count_finished(run_dir)
    if kept:
        return f"interrupted; finished blocks ({kept}) are kept in {run_dir}: the same command goes on from there"
    return "interrupted; no block was finished yet, so the same command begins anew"


def _say(message: str) -> None:
    # Text and soft_wrap: a message may hold brackets, and a path should stay in one piece.
    Console(stderr=True).print(Text(f"hessquant: {message}"), soft_wrap=True)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hessquant {hessquant.__version__}")
        raise typer.Exit
