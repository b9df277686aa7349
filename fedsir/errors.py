"""The two ways a command can end badly.

`BadInput` is the user's to mend (exit code 2): it is raised before work starts, in a few lines that say what
failed for whom, the offending value and the remedy. `RunFailed` is a failure while working (exit code 1): it
names condition, client and round, and keeps the cause.
"""


class FedsirError(Exception):
    """Base of every error that fedsir raises on purpose."""


class BadInput(FedsirError):
    """Configuration, data or environment that cannot work; nothing has been started or changed."""


class RunFailed(FedsirError):
    """A run that stopped while working; what was recorded before stays recorded."""


class WorkersLost(RunFailed):
    """What runs the clients is gone, for no fault of the run that it happened to, which can be continued."""


class StoreUnreachable(RunFailed):
    """The record could not be delivered, for no fault of the run; its checkpoint keeps it, so that it can be later."""


def first_line(error: BaseException) -> str:
    """First line of what an error says, or its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
