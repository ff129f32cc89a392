"""Recognises a lack of memory, in whatever form a library reports it."""

from __future__ import annotations

import errno
import re

from collegium.errors import OutOfMemory

LACK = (
    "the memory did not suffice; finished rounds are kept: choose a smaller training.batch_size or "
    "sampling.crop, or fewer engine.workers and engine.jobs, and continue with 'collegium resume'"
)
"""The sentence on a lack of memory, with the remedy for the user of a run."""

_SAID = re.compile(
    r"(can't|cannot|could not|failed to|unable to) (allocate|map|create thread|start new thread)"
    r"|can't start new thread|out of memory|bad_alloc|not enough memory",
    re.IGNORECASE,
)


def out_of_memory(error: BaseException) -> OutOfMemory | None:
    """Return the sentence on a lack of memory if that is what an error, or its cause, reports.

    None for any other error. torch reports it as a `RuntimeError`, an address-space limit
    (``ulimit -v``) also as an `OSError` or an `ImportError`; and a file's reader turns whatever it
    catches into a `DataError`, whose cause it is then.

    Args:
        error: the error.
    """
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, MemoryError) or _says_so(found):
            return OutOfMemory(LACK)
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return None


def _says_so(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    kinds = (RuntimeError, OSError, ImportError)
    return isinstance(error, kinds) and _SAID.search(str(error)) is not None
