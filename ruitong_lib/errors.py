"""The errors that Ruitong raises: what was got, what is allowed, what to do next."""

import difflib
from collections.abc import Iterable


class RuitongError(ValueError):
    """Bad input: a parameter, a file, a prompt set."""


class RefusedError(RuitongError):
    """Two shards that cannot be compared; the message names the cause."""


class DeviceUnavailableError(RuitongError):
    """The device asked for is not here; the message names the part that is missing."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f" Did you mean {close[0]!r}?" if close else ""
