"""Files whose content is not on this machine: broken links, and pointers to content elsewhere.

DataLad and git-annex keep a data set as links, or as small pointer files, until its content is
fetched; Git LFS keeps pointer files.
"""

from pathlib import Path

NO_IMAGE = {
    ".csv", ".tsv", ".txt", ".md", ".json", ".xml", ".yaml", ".yml", ".pdf", ".html", ".log",
    ".xls", ".xlsx", ".doc", ".docx", ".py", ".sh", ".zip",
}  # fmt: skip
"""Suffixes of files that are plainly no images, in lower case."""

_MOST = 32 * 1024  # bytes; git-annex takes no larger file for a pointer
_ANNEX = "get its content with `datalad get` or `git annex get`"
_LFS = (b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/")


def is_there(path: Path) -> bool:
    """Return whether there is a file or folder, or a link, even if what it leads to is absent."""
    return path.exists() or path.is_symlink()


def missing_content(path: Path) -> str | None:
    """Return what is wrong with a file whose content is elsewhere, and the remedy; otherwise None.

    Args:
        path: The file; a folder is never one.
    """
    if path.is_symlink() and not path.exists():
        if "annex/objects/" in str(path.readlink()).replace("\\", "/"):
            return f"is a link of git-annex to content that is not here: {_ANNEX}"
        return (
            "is a link to a file that is not there: restore that file or the link, or in a data "
            f"set of DataLad or git-annex {_ANNEX}"
        )
    try:
        if not path.is_file() or path.stat().st_size > _MOST:
            return None
        with path.open("rb") as file:
            start = file.read(512)
    except OSError:
        return None  # which reading it reports
    if start.startswith(_LFS):
        return "is a pointer of Git LFS, not the file itself: get its content with `git lfs pull`"
    # a link that was checked out as text, where there are no links, begins with its folders
    if start.lstrip(b"./\\").startswith((b"annex/objects/", b"git/annex/objects/")):
        return f"is a pointer of git-annex, not the file itself: {_ANNEX}"
    return None
