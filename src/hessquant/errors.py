"""Every exception that Hessquant raises on purpose.

The branch an error hangs from decides the exit code of the command line: 2 below `RefusedError`, 3 below `FailedError`.
Messages name the layer, the value, and what to do about it.
"""


class HessquantError(Exception):
    """Base of every error raised on purpose; `exit_code` is the command line's status."""

    exit_code = 3


class RefusedError(HessquantError):
    """Refused before any work was done."""

    exit_code = 2


class ConfigError(RefusedError):
    """An option has a value that means nothing."""


class SourceError(RefusedError):
    """The model cannot be found, read or trusted."""


class PlanError(RefusedError):
    """The model and the options do not fit together."""


class GroupSizeError(PlanError):
    """A group size does not divide a weight's inputs."""


class PatternError(PlanError):
    """An include or exclude pattern matches nothing."""


class ServeError(PlanError):
    """A client that is to serve the result does not open it."""


class CalibrationError(RefusedError):
    """The calibration text cannot be used."""


class NotEnoughTextError(CalibrationError):
    """There are fewer tokens than the windows asked for need."""


class OutputError(RefusedError):
    """The output directory cannot be written to."""


class RunError(RefusedError):
    """The run directory belongs to another run, or to another process."""


class FailedError(HessquantError):
    """Failed on the way; nothing that looks finished is left behind."""


class NonFiniteError(FailedError):
    """NaN or Inf where a finite number is needed; more damping never helps.

    Attributes:
        place: Index of the first such number in the tensor that was looked at, when it is known.
        value: The number itself, likewise.
    """

    def __init__(self, message: str, place: tuple[int, ...] | None = None, value: float | None = None) -> None:
        super().__init__(message)
        self.place, self.value = place, value


class FactorizationError(FailedError):
    """The Hessian cannot be factored, even with the largest damping allowed.

    Attributes:
        members: Of a batch of Hessians, those that cannot with the damping asked for; more may help each.
    """

    def __init__(self, message: str, members: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.members = members


class GridError(FailedError):
    """The weights cannot be put on the grid asked for."""


class DeviceMemoryError(FailedError):
    """An accelerator has too little memory, however little is held at once."""


class PeerError(FailedError):
    """Another process of the run has ended, or cannot be reached."""


class CaptureError(FailedError):
    """The forward pass did not go as the plan said it would."""


class CheckpointError(FailedError):
    """A checkpoint is malformed, or does not hold what it says."""


class VerificationError(CheckpointError):
    """What was written differs from what was solved."""
