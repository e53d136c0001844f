"""The errors that end a run, and their exit statuses. Imports no torch.

A `UserError` is a mistake that the user can fix: one line without a traceback, status 2. A `RunError` is a failure of
the run, such as a dead engine or a missed deadline: one line, status 1. Everything else is a bug and keeps its
traceback.
"""

from __future__ import annotations

import errno

EXIT_OK = 0
EXIT_RUN = 1
EXIT_USER = 2
EXIT_SIGNAL = 128  # plus the signal number, as in a shell

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of an OSError: the disk or the quota is full."""
MAY_PASS = (*NO_SPACE, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
"""The same, or a network file system fails over."""

Problem = tuple[str, str]
"""A fault and its fix; a check that knows no `where` returns it."""


class UserError(ValueError):
    """Bad input: what is wrong, where, and how to fix it.

    Example:
        raise UserError(
            "group_size is 1, but baseline 'rloo' needs other responses in the group",
            where="config: group_size",
            fix="set group_size to 2 or more, or algo.baseline to 'none'",
        )
        -> "error: group_size is 1, but ... [config: group_size]. Fix: set group_size to 2 or more, or ..."
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        what = " ".join(line.strip() for line in what.splitlines())  # a user's own error may have several lines
        self.what, self.where, self.fix = what, where, fix
        place = f" [{where}]" if where else ""
        super().__init__(f"{what}{place}" + (f". Fix: {fix}" if fix else ""))


class RunError(RuntimeError):
    """The run cannot continue. The message names what failed, or who waited for what."""

    raised_on_all_ranks = False
    """Whether all ranks raise this error together. Then the run saves its state, and one rank prints it."""


class EngineLostError(RunError):
    """An engine died, hung or lost its connection. Restarting it may help."""


class EnginesGoneError(RunError):
    """No engine came back, or finished its samples, in time."""


class UnwrittenError(RunError):
    """The samples of a step cannot be written."""


class BrokenStepError(RunError):
    """The samples or the gradient of a step cannot be used: they are not finite, or of other weights."""

    raised_on_all_ranks = True  # every rank has the same samples and sums


class BrokenWeightsError(RunError):
    """The weights are not finite. Nothing saves them: a checkpoint would replace those from which a run can resume."""

    raised_on_all_ranks = True


class DeadlineError(RunError):
    """`who` waited for `what` longer than `seconds`. Example: DeadlineError("rank 0", "weights push 12", 60.0)"""

    def __init__(self, who: str, what: str, seconds: float) -> None:
        self.who, self.what, self.seconds = who, what, seconds
        super().__init__(f"{who} waited {seconds:g} s for {what} and gave up")


class EngineDeadlineError(DeadlineError, EngineLostError):
    """An engine did not answer before its deadline."""


class WeightError(RunError):
    """Pushed weights do not match the model, or received weights do not match the sent ones."""


class DamagedError(WeightError):
    """The bytes of a bucket changed on the way. A retry may help."""
