"""The commands: parse, make the config, run the pipeline, give an exit code.

Everything that a command needs from torch is imported inside it, before its work begins: `--help` should not wait for
that, and a signal that comes while libraries are being imported ends the process at once.
"""

import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console, RenderableType
from rich.text import Text

import hessquant
from hessquant import peers
from hessquant.config import Config
from hessquant.errors import HessquantError, RefusedError
from hessquant.interrupts import INTERRUPTED, Interrupted, Interrupts
from hessquant.measures import Trials
from hessquant.options import OnceEach, options_of, signature_of, taken_out
from hessquant.records import Plan
from hessquant.report.json_report import error_json, to_json
from hessquant.report.progress import BarProgress, LineProgress, make_progress
from hessquant.report.terminal import render_evaluation, render_export, render_inspection, render_plan, render_run
from hessquant.results import Evaluation, ExportReport, Inspection, RunReport
from hessquant.run.files import count_finished

_DONE, _REFUSED, _FAILED, _DEGRADED = 0, 2, 3, 4

_INTERRUPTS: ContextVar[Interrupts] = ContextVar("interrupts")

_Model = Annotated[str, typer.Argument(metavar="MODEL", help="Local directory, hub id, .gguf file, or 'demo'.")]
_Out = Annotated[Path, typer.Argument(metavar="OUT", help="Directory that will hold the result.")]

# Typer does not export the base of its usage errors in every release that we allow.
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__base__)

app = typer.Typer(name="hessquant", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def run(arguments: list[str], interrupts: Interrupts) -> int:
    """Run one command and give its exit code; says what went wrong.

    Args:
        arguments: Of the command line.
        interrupts: What becomes of signals meanwhile.
    """
    interrupts.error_json = error_json
    _INTERRUPTS.set(interrupts)
    code = INTERRUPTED
    try:
        # Commands return their exit code; without standalone mode typer passes it on, and errors too.
        code = int(app(arguments, prog_name="hessquant", standalone_mode=False) or _DONE)
    except BaseException as error:
        if interrupts.number is None and not isinstance(error, (Interrupted, KeyboardInterrupt)):
            return _give_up_over(error)
    # Typer itself may catch Ctrl-C, and then hands back its exit code.
    if interrupts.number is None and code != INTERRUPTED:
        return code
    if interrupts.told():
        return interrupts.code
    return _give_up(*interrupts.ending())


def _give_up_over(error: BaseException) -> int:
    """Tell of an error; its exit code."""
    if _interrupts().elsewhere() is not None:
        return _give_up(*_interrupts().ending())
    say, message, code = "", str(error), _FAILED
    match error:
        case _UsageError():
            if _interrupts().speaks():
                error.show()
            message, code = error.format_message(), _REFUSED
        case HessquantError():
            code = error.exit_code
            say = f"{'refused' if isinstance(error, RefusedError) else 'failed'}: {error}"
        case Exception():
            traceback.print_exception(error)
            say = "failed: this is a bug in Hessquant; please report it with the traceback above and the command"
        case _:
            raise error
    return _give_up(type(error).__name__, message, code, say)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hessquant {hessquant.__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Quantize the weights of a transformer by GPTQ, to a checkpoint that servers open."""


def _command(*settings: str, required: str = "") -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Make a command of a function: its parameters `config` and `trials` become options, and `--json` is added.

    Args:
        settings: Those of `Config` that it has options for; none = all.
        required: One of them that must be given.
    """
    options = options_of(*settings, required=required)

    def register(work: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(work)
        def run(*, as_json: bool, **given: Any) -> int:
            _interrupts().reported = not as_json
            settings = taken_out(given, options)
            return work(**settings, **given)

        run.__signature__ = signature_of(work, options)  # type: ignore[attr-defined]
        return app.command(cls=OnceEach)(run)

    return register


@_command()
def plan(
    model: _Model,
    config: Config,
    calibration: Annotated[
        str, typer.Option(metavar="SOURCE", help="As quantize takes it; of a text only the beginning is read.")
    ] = "builtin",
    processes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Also estimate what a run over so many processes takes.", show_default="no such estimate"
        ),
        "See [scaling.md](scaling.md#what-a-run-costs).",
    ] = None,
) -> int:
    """Show what quantize would do, without reading weights unless bits are to be chosen."""
    with _work(), make_progress(Console(stderr=True)) as progress:
        planned = hessquant.pipeline.make_plan(
            model, config, calibration=calibration, processes=processes, progress=progress
        )
    _say_unknown(planned, config)
    _show(planned, render_plan(planned))
    return _DONE


@_command()
def quantize(
    model: _Model,
    out: _Out,
    config: Config,
    calibration: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="Calibration text: builtin, a .txt or .jsonl file, or hub:ID, with :CONFIG :SPLIT :COLUMN after it.",
        ),
        "See [Calibration](#calibration).",
    ] = "builtin",
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where finished blocks are kept.", show_default="OUT.run")
    ] = None,
    keep_run: Annotated[bool, typer.Option("--keep-run", help="Leave them there when the run has ended well.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 4 when anything was degraded.")] = False,
) -> int:
    """Quantize MODEL and write the checkpoint and its report to OUT."""
    kept = run_dir or out.with_name(f"{out.name}.run")
    _interrupts().speaks, _interrupts().elsewhere = peers.speaks, peers.failure
    _interrupts().describe = lambda: _how_to_go_on(kept, out)
    with _work() as tables, _shown_on(tables, config) as progress:
        report = hessquant.pipeline.quantize(
            model,
            out,
            config,
            calibration=calibration,
            run_dir=kept,
            keep_run=keep_run,
            progress=progress,
        )
    if not peers.speaks():
        return _DONE
    _show(report, render_run(report, out))
    if strict and report.degraded:
        _say(f"degraded, and --strict was asked for: {len(report.degraded)} things, first: {report.degraded[0]}")
        return _DEGRADED
    return _DONE


@_command("format", "serve", "shard_bytes", "trust_remote_code", required="format")
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Quantized checkpoint, of any writer.")],
    out: _Out,
    config: Config,
    base: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="For gguf: llama.cpp's 16-bit conversion of the model before quantization."),
    ] = None,
) -> int:
    """Write a quantized checkpoint in another format, without quantizing again."""
    with _work() as tables, _shown_on(tables, config) as progress:
        report = hessquant.pipeline.export(checkpoint, out, config, base=base, progress=progress)
    _show(report, render_export(report, out))
    return _DONE


@_command("device", "trust_remote_code")
def evaluate(
    model: _Model,
    against: Annotated[
        str | None, typer.Option(metavar="BASE", help="Compare with this model on the same tokens.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="Text to evaluate on.", show_default="the builtin held-out text")
    ] = None,
    num_windows: Annotated[int | None, typer.Option(min=1, help="Windows to use.", show_default="all")] = None,
    window_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens per window.", show_default="the least of 2048 and all contexts")
    ] = None,
    *,
    trials: Trials,
    config: Config,
) -> int:
    """Measure MODEL's perplexity, and its distance from BASE."""
    with _work(), make_progress(Console(stderr=True)) as progress:
        evaluation = hessquant.pipeline.evaluate(
            model,
            against=against,
            text=text,
            num_windows=num_windows,
            window_length=window_length,
            config=config,
            progress=progress,
            **trials,
        )
    _show(evaluation, render_evaluation(evaluation))
    return _DONE


@_command("trust_remote_code")
def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint directory.")], config: Config
) -> int:
    """Show what a checkpoint holds and what is wrong with it."""
    with _work():
        inspection = hessquant.pipeline.inspect(directory, trust_remote_code=config.trust_remote_code)
    _show(inspection, render_inspection(inspection))
    return _FAILED if inspection.faults else _DONE


@contextmanager
def _work() -> Iterator[Console]:
    """Where a command's work is done: a signal ends it in order, and what libraries print is no output.

    Gives the console for tables that are shown meanwhile.
    """
    tables = Console(file=sys.stdout if _interrupts().reported else sys.stderr)
    with redirect_stdout(sys.stderr):
        import_module("hessquant.pipeline")
    with _interrupts(), redirect_stdout(sys.stderr):
        yield tables


def _interrupts() -> Interrupts:
    """What becomes of signals while this command runs."""
    return _INTERRUPTS.get()


def _show(record: Plan | RunReport | ExportReport | Evaluation | Inspection, table: RenderableType) -> None:
    if _interrupts().reported:
        Console().print(table)
    else:
        told = to_json(record)
        _interrupts().reported = True
        typer.echo(told)


def _shown_on(tables: Console, config: Config) -> BarProgress | LineProgress:
    """The progress of a run that has a plan, which is shown as a table."""

    def show(planned: Plan) -> None:
        tables.print(render_plan(planned))
        _say_unknown(planned, config)

    return make_progress(Console(stderr=True), show)


def _say_unknown(planned: Plan, config: Config) -> None:
    """What `--serve` asked for and nobody knows: no reason to refuse, and none to keep quiet."""
    for verdict in planned.servers:
        if verdict.opens == "unknown" and verdict.is_named(config.serve):
            _say(f"--serve: whether {verdict.server} opens this is not known: {verdict.reason}")


def _give_up(kind: str, message: str, code: int, say: str) -> int:
    if not _interrupts().speaks():
        return code
    if say:
        _say(say)
    if not _interrupts().reported:
        _interrupts().reported = True
        typer.echo(error_json(kind, message, code))
    return code


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
