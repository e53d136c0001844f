"""The errors a run can end with, and the exit status each one carries.

A `UserError` is something the person at the keyboard can mend: it is printed as one line, without a traceback, and ends
the process with status 2. A `RunError` is a fault of the run itself (an engine died, a wait ran past its deadline): one
line as well, status 1. Everything else is a bug and keeps its traceback.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_RUN = 1
EXIT_USER = 2


class UserError(ValueError):
    """Bad input: what is wrong, where, and how to mend it.

    Example:
        raise UserError(
            "group_size is 1, but baseline 'rloo' needs the other responses of the group",
            where="config: group_size",
            mend="set group_size to 2 or more, or algo.baseline to 'none'",
        )
        -> "error: group_size is 1, but ... [config: group_size]. Fix: set group_size to 2 or more, or ..."
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        place = f" [{where}]" if where else ""
        remedy = f". Fix: {fix}" if fix else ""
        super().__init__(f"{what}{place}{remedy}")


class RunError(RuntimeError):
    """A running job cannot go on: the message names who waited for what, or what died."""


class EngineLostError(RunError):
    """An engine died, hung past its deadline, or lost its connection: a new one may do what it did not."""


class DeadlineError(RunError):
    """A wait ran past its deadline.

    `who` waited for `what`; `seconds` is the deadline. Example: DeadlineError("rank 0", "weights push 12", 60.0).
    """

    def __init__(self, who: str, what: str, seconds: float) -> None:
        self.who, self.what, self.seconds = who, what, seconds
        super().__init__(f"{who} waited {seconds:g} s for {what} and gave up")


class EngineDeadlineError(DeadlineError, EngineLostError):
    """An engine did not answer before its deadline and was given up."""


class WeightError(RunError):
    """A push is not what the model is made of, or what arrived is not what was sent."""


class DamagedError(WeightError):
    """A bucket's bytes are not those that were sent; sent once more they may arrive."""
