"""Every error a user can cause: one class an exit code, with the way out beside the message."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes, one a class of fault."""

    GOOD = 0
    FINDINGS = 1
    USAGE = 2
    INCOMPLETE = 3
    STRUCTURE = 4
    HASH = 5
    SCHEMA = 6
    VALUES = 7
    IO = 8
    REFUSED = 9


class K3QuantError(Exception):
    """A fault with a message for people and an exit code for scripts.

    The message reads ``subject: expected ..., got ...``; `hint` names the next step.
    """

    exit_code = ExitCode.IO

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(K3QuantError):
    """Options that do not fit together, or name nothing."""

    exit_code = ExitCode.USAGE


class IncompleteError(K3QuantError):
    """A file, tensor or text is missing, partial or short."""

    exit_code = ExitCode.INCOMPLETE


class StructureError(K3QuantError):
    """A header, an index or a layout is malformed."""

    exit_code = ExitCode.STRUCTURE


class HashError(K3QuantError):
    """Bytes differ from the recorded digest."""

    exit_code = ExitCode.HASH


class SchemaError(K3QuantError):
    """Config, names, shapes and dtypes do not agree."""

    exit_code = ExitCode.SCHEMA


class ValuesError(K3QuantError):
    """Stored or computed values that cannot be right (NaN, infinity, bad scales)."""

    exit_code = ExitCode.VALUES


class ResourceError(K3QuantError):
    """The disk, the network or a resource limit failed."""

    exit_code = ExitCode.IO


class RefusedError(K3QuantError):
    """The work would lose or mix data, so it was not started."""

    exit_code = ExitCode.REFUSED
