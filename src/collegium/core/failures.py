"""The failures that a site reports to the server, each by a code that stands for a sentence.

Between hospitals no text of an error leaves a site, since it may hold a path or a patient's name:
only the code and a few names do, and the server makes the sentence from its own list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from collegium.core.memory import out_of_memory
from collegium.core.text import printable
from collegium.core.userfile import client_mistake, is_on_one_machine
from collegium.errors import (
    CheckpointError,
    ClientError,
    CollegiumError,
    ConfigError,
    DataError,
    DivergedError,
    EgressError,
    MissingReply,
    NotInstalled,
    OutOfMemory,
    ProtocolError,
    StorageError,
)

FAILURE = "failure"
"""The name of a failure as a part of a message, for a site's policy and its ledger."""

LONGEST = 2000
"""Characters of a sentence of another process that are shown at most."""


@dataclass(frozen=True)
class Known:
    """A failure that a site can report.

    Attributes:
        kind: the error that it is at the server.
        sentence: what is said of it, with the names in braces that it comes with.
    """

    kind: type[CollegiumError]
    sentence: str


_LOG = "the details are in the log of this site"

FAILURES: Mapping[str, Known] = {
    "config": Known(ConfigError, f"a setting cannot work there; {_LOG}"),
    "package": Known(NotInstalled, f"a package is missing there; {_LOG}"),
    "egress": Known(EgressError, f"its policy does not let out what is asked for; {_LOG}"),
    "egress_part": Known(
        EgressError, "the policy of site {site!r} does not let {part!r} out; nothing was sent"
    ),
    "egress_algorithm": Known(
        EgressError,
        "{algorithm} sends {part!r} ({what}), which the policy of site {site!r} forbids; allow it "
        "there or choose another algorithm",
    ),
    "data": Known(DataError, f"a file, a mask, a table or a split there is unusable; {_LOG}"),
    "diverged": Known(
        DivergedError,
        f"the loss became NaN or infinite there; lower training.lr or set clip_norm; {_LOG}",
    ),
    "reply": Known(MissingReply, f"something there did not answer; {_LOG}"),
    "protocol": Known(ProtocolError, f"a message was not as the protocol demands; {_LOG}"),
    "too_large": Known(
        ProtocolError,
        "a message of {size} bytes is over the limit of {limit} bytes; raise largest in the site's "
        "file, or use a smaller model",
    ),
    "checkpoint": Known(
        CheckpointError, f"its stored state is damaged or that of another run; {_LOG}"
    ),
    "storage": Known(StorageError, f"its disk is full or cannot be used; {_LOG}"),
    "memory": Known(
        OutOfMemory,
        f"the memory there does not suffice; lower training.batch_size or the crop; {_LOG}",
    ),
    "client": Known(ClientError, f"the work failed there; {_LOG}"),
    "withheld": Known(ClientError, f"it failed, and its policy does not let out why; {_LOG}"),
    "not_accepted": Known(
        ConfigError,
        "site {site!r} has not accepted the experiment {experiment}; its operator reads it with "
        "'collegium site experiments SITE' and accepts it with 'collegium site accept SITE "
        "{experiment}', where SITE is the site's own file",
    ),
    "other_settings": Known(
        ConfigError,
        "site {site!r} holds a run {run!r} made with other settings; choose another name for the "
        "experiment",
    ),
    "cannot_compile": Known(
        ConfigError,
        f"training.compile is on, and site {{site!r}} cannot compile; have a compiler installed "
        f"there, or set it to off in an experiment with another name; {_LOG}",
    ),
    "secure_range": Known(
        ClientError,
        "part {part!r} of site {site!r}, times its weight, is beyond the {limit} that a sum over "
        "{sites} sites holds; lower secure_mean.fraction_bits, or set secure_mean.bits to 64",
    ),
    "secure_few": Known(
        ClientError,
        "site {site!r} was asked for a sum over {sites} sites, and secure_mean.min_sites is "
        "{least}; nothing was sent",
    ),
    "secure_signature": Known(
        ClientError,
        "site {site!r} was sent a key of {other!r} that the certificate of {other!r} has not "
        "signed; nothing was sent; whoever runs the server has to say how that could be",
    ),
    "secure_unsigned": Known(
        ConfigError,
        "site {site!r} has no certificate to sign its keys for secure_mean with; start it with "
        "--kit, or name under identity in the site's file a folder with client.crt, client.key and "
        "rootCA.pem of its kit",
    ),
    "own_settings": Known(
        ConfigError,
        "the variation {variation!r} changes what the file of site {site!r} says of its data, its "
        "policy or its device; leave that out",
    ),
    "other_version": Known(
        ConfigError,
        "the server runs {package} {theirs} and this site {own}, whose results may differ; install "
        "the same version",
    ),
    "other_package": Known(
        ConfigError,
        "the experiment names {place!r}, which may be code of another package; install it and name "
        "it under methods in the site's file",
    ),
    "method_missing": Known(
        ConfigError,
        "the {method} is not installed here; if it is a package of your own, install it and name "
        "it under methods in the site's file",
    ),
    "other_code": Known(
        ConfigError,
        "the code of the {method} differs from the one that is installed here; install the same "
        "version",
    ),
}
"""The failures that a site can report, by code."""

_BY_KIND = {
    known.kind: code
    for code, known in reversed([*FAILURES.items()])
    if "{" not in known.sentence and code != "withheld"
}


def known_error(code: str, **names: str) -> CollegiumError:
    """Return the error of a known failure, which leaves a site with its code and names.

    Args:
        code: the failure's, see `FAILURES`.
        **names: those of its sentence: words that the server knows.
    """
    known = FAILURES[code]
    error = known.kind(known.sentence.format(**names))
    error.code, error.names = code, names
    return error


def reported_error(error: Exception) -> Exception:
    """Return the error that is reported for another one: a lack of memory, a user's mistake.

    Args:
        error: the failure; what was returned before is returned as it is.
    """
    return out_of_memory(error) or client_mistake(error)


def describe(error: Exception, *, withhold: bool = False) -> dict[str, Any]:
    """Return the part of a failure at a site that the server may see.

    Between hospitals this is a code and names, see `FAILURES`. On one machine it is kind and text;
    that of errors about files and disks, and of unforeseen ones, may hold paths or patients' names
    and stays in the log there too.

    Args:
        error: the failure.
        withhold: whether the site's policy does not let out why it failed.
    """
    error = reported_error(error)
    if is_on_one_machine():
        kind = FAILURES[_code_of(error)].kind.__name__
        if isinstance(error, ClientError | ConfigError):
            return {"kind": kind, "text": str(error)}
        return {"kind": kind, "text": f"{type(error).__name__}; {_LOG}"}
    if withhold:
        return {"code": "withheld", "names": {}}
    if isinstance(error, CollegiumError) and error.code:
        return {"code": error.code, "names": dict(error.names)}
    return {"code": _code_of(error), "names": {}}


def _code_of(error: Exception) -> str:
    """Return the code of an error that has none of its own."""
    kinds = (kind for kind in type(error).__mro__ if kind in _BY_KIND)
    return _BY_KIND[next(kinds, ClientError)]


def kind_and_sentence(failure: Mapping[str, Any]) -> tuple[type[CollegiumError], str]:
    """Return the error and the sentence that a site's failure stands for at the server.

    Args:
        failure: what `describe` returned, not trusted.
    """
    known = FAILURES.get(str(failure.get("code")))
    if known is not None:
        given = failure.get("names")
        names = _Names(given if isinstance(given, Mapping) else {})
        return known.kind, known.sentence.format_map(names)
    kinds = {kind.__name__: kind for kind in _BY_KIND}
    kind = kinds.get(str(failure.get("kind")), ClientError)
    return kind, printable(str(failure.get("text", "it did not say why it failed")), LONGEST)


class _Names(dict[str, str]):
    """The names of a sentence as another process gave them; "?" for those that are missing."""

    def __getitem__(self, name: str) -> str:
        return printable(str(self.get(name, "?")), 100)
