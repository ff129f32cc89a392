"""All exceptions of the library.

Every error that a user can cause is a `CollegiumError`: one sentence that states the problem, its
place, and what to do. The command line prints that sentence without a traceback and exits with the
class's `exit_code`.

    CollegiumError
      ConfigError        a key, a value or a combination that cannot work              exit code 2
        NotInstalled     an optional dependency is missing                             exit code 2
        EgressError      a site's policy forbids a part that the algorithm sends       exit code 2
      DataError          a file, a mask, a manifest or a split                         exit code 3
      ClientError        something failed at a client while it worked for the server   exit code 4
        DivergedError    the loss became NaN or infinite                               exit code 4
        MissingReply     a client did not reply                                        exit code 4
        OutOfMemory      the memory of the machine did not suffice                     exit code 4
        ProtocolError    a message is not as the protocol demands                      exit code 4
      StorageError       the disk: full, not writable, a damaged checkpoint            exit code 5
        CheckpointError  a run cannot continue from its stored state                   exit code 5
"""

from collections.abc import Mapping
from types import MappingProxyType


class CollegiumError(Exception):
    """The root of every error that a user can cause.

    Attributes:
        exit_code: the exit code of the command line.
        code: how a site tells the server of it, see `collegium.core.failures`; empty: as its kind.
        names: the names that it is told with.
    """

    exit_code = 1
    code: str = ""
    names: Mapping[str, str] = MappingProxyType({})


class ConfigError(CollegiumError):
    """The configuration names something that does not exist or cannot work."""

    exit_code = 2


class NotInstalled(ConfigError):  # noqa: N818  (the field's own names read better without the suffix)
    """An optional dependency is missing."""


class EgressError(ConfigError):
    """A site's policy forbids a part that the algorithm sends."""


class DataError(CollegiumError):
    """A file, a mask, a manifest or a split is unusable."""

    exit_code = 3


class ClientError(CollegiumError):
    """Something failed at a client while it worked for the server."""

    exit_code = 4


class DivergedError(ClientError):
    """The training loss became NaN or infinite at a client."""


class MissingReply(ClientError):  # noqa: N818
    """A client did not reply in time."""


class OutOfMemory(ClientError):  # noqa: N818
    """The memory of the machine did not suffice, at a client or where a run was started."""


class ProtocolError(ClientError):
    """A message is not as the protocol demands."""


class StorageError(CollegiumError):
    """Something could not be written to, or read from, the disk."""

    exit_code = 5


class CheckpointError(StorageError):
    """A run cannot continue from its stored state."""
