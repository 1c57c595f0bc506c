"""The command line: parse, make the config, run the pipeline, give an exit code.

    0    done
    2    refused before any work was done, or the command line is wrong
    3    failed on the way, or `inspect` found faults
    4    done, but something was degraded and `--strict` was asked for
    130  interrupted by Ctrl-C (143 by SIGTERM); `quantize` says how to go on

With `--json`, standard output holds exactly one JSON object; tables, progress and messages go to standard error.
"""

import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console, RenderableType
from rich.text import Text

import hessquant
from hessquant.config import Config, Format
from hessquant.errors import HessquantError, RefusedError
from hessquant.options import Json, Model, OnceEach, Serve, ShardSize, TrustRemoteCode, parse_size, takes_config
from hessquant.records import Evaluation, ExportReport, Inspection, Plan, RunReport
from hessquant.report.json_report import error_json, to_json
from hessquant.report.progress import make_progress
from hessquant.report.terminal import render_evaluation, render_export, render_inspection, render_plan, render_run

# The pipeline is imported inside each command: it brings torch, and `--help` should not wait for that.

_DONE, _REFUSED, _FAILED, _DEGRADED, _INTERRUPTED, _TERMINATED = 0, 2, 3, 4, 130, 143

# Typer does not export the base of its usage errors in every release that we allow.
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__base__)

app = typer.Typer(
    name="hessquant",
    help="Quantize the weights of a transformer by GPTQ, to a checkpoint that servers open.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code; `arguments` default to the process's own."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # Looked for here, not in the parsed options, since a usage error leaves none.
    as_json = "--json" in arguments
    received: list[int] = []
    try:
        # Commands return their exit code; without standalone mode typer passes it on, and errors too.
        with _sigterm_interrupts(received):
            code = int(app(arguments, prog_name="hessquant", standalone_mode=False) or _DONE)
    except _UsageError as error:
        error.show()
        return _give_up(as_json, type(error).__name__, error.format_message(), _REFUSED, say="")
    except HessquantError as error:
        verb = "refused" if isinstance(error, RefusedError) else "failed"
        return _give_up(as_json, type(error).__name__, str(error), error.exit_code, say=f"{verb}: {error}")
    except _RunInterrupted as error:
        return _give_up(as_json, "KeyboardInterrupt", str(error), error.exit_code, say=str(error))
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except Exception as error:
        traceback.print_exc()
        say = "failed: this is a bug in Hessquant; please report it with the traceback above and the command"
        return _give_up(as_json, type(error).__name__, str(error), _FAILED, say=say)
    # Typer itself may catch Ctrl-C, and then hands back its exit code.
    if code == _INTERRUPTED:
        return _give_up(
            as_json, "KeyboardInterrupt", "interrupted", _TERMINATED if received else code, say="interrupted"
        )
    return code


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
    run_dir = run_dir or out.with_name(f"{out.name}.run")

    try:
        with redirect_stdout(sys.stderr), make_progress(Console(stderr=True)) as progress:
            from hessquant import pipeline

            report = pipeline.quantize(
                model,
                out,
                config,
                calibration=calibration,
                run_dir=run_dir,
                keep_run=keep_run,
                progress=progress,
                on_plan=lambda planned: _show_plan(planned, config, tables),
            )
    except KeyboardInterrupt as interrupt:
        raise _RunInterrupted(interrupt, run_dir) from interrupt
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
    with redirect_stdout(sys.stderr), make_progress(Console(stderr=True)) as progress:
        from hessquant import pipeline

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
    with redirect_stdout(sys.stderr), make_progress(Console(stderr=True)) as progress:
        from hessquant import pipeline

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
    as_json: Json = False,
) -> int:
    """Show what a checkpoint holds and what is wrong with it."""
    with redirect_stdout(sys.stderr):
        from hessquant import pipeline

        inspection = pipeline.inspect(directory)
    _show(inspection, render_inspection(inspection), as_json)
    return _FAILED if inspection.faults else _DONE


def _show(
    record: Plan | RunReport | ExportReport | Evaluation | Inspection, table: RenderableType, as_json: bool
) -> None:
    if as_json:
        typer.echo(to_json(record))
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


def _give_up(as_json: bool, kind: str, message: str, code: int, say: str) -> int:
    if say:
        _say(say)
    if as_json:
        typer.echo(error_json(kind, message, code))
    return code


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which is to end a run as Ctrl-C does."""


@contextmanager
def _sigterm_interrupts(received: list[int]) -> Iterator[None]:
    """Inside, SIGTERM raises and is noted; outside of the main thread, where it cannot be handled, nothing changes."""

    def handle(number: int, _frame: object) -> None:
        received.append(number)
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _RunInterrupted(Exception):
    """A run that ended by Ctrl-C or SIGTERM; the message says how to go on."""

    def __init__(self, interrupt: KeyboardInterrupt, run_dir: Path) -> None:
        from hessquant.run.store import count_finished

        kept = count_finished(run_dir)
        super().__init__(
            f"interrupted; finished blocks ({kept}) are kept in {run_dir}: the same command goes on from there"
            if kept
            else "interrupted; no block was finished yet, so the same command begins anew"
        )
        self.exit_code = _TERMINATED if isinstance(interrupt, _Terminated) else _INTERRUPTED


def _say(message: str) -> None:
    # Text and soft_wrap: a message may hold brackets, and a path should stay in one piece.
    Console(stderr=True).print(Text(f"hessquant: {message}"), soft_wrap=True)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hessquant {hessquant.__version__}")
        raise typer.Exit


if __name__ == "__main__":
    sys.exit(main())
