"""The command line's entry: signals are handled first, everything else is imported after that.

    0    done
    2    refused before any work was done, or the command line is wrong
    3    failed on the way, or `inspect` found faults
    4    done, but something was degraded and `--strict` was asked for
    130  interrupted by Ctrl-C (143 by SIGTERM), at any moment; `quantize` says how to go on

With `--json`, standard output holds exactly one JSON object; tables, progress and messages go to standard error.
"""

import sys

from hessquant.interrupts import Interrupts


def main(arguments: list[str] | None = None) -> int:
    """Run one command and give its exit code.

    Args:
        arguments: Of the command line. None = the process's own: the process is then the command's, and ends with it.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    # Looked for here, since a usage error leaves no parsed options; those count once there are any.
    interrupts = Interrupts(owns_process=arguments is None, as_json="--json" in given)
    try:
        from hessquant.commands import run

        code = run(given, interrupts)
    finally:
        if arguments is not None:
            interrupts.remove()
    if arguments is None:
        interrupts.end(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
