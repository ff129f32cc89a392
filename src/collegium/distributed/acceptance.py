"""Experiments that a site's operator accepts by their digests, kept in the site's own folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from collegium.core.failures import known_error
from collegium.core.files import write_atomically
from collegium.errors import ConfigError


class Acceptance:
    """The experiments that were asked for and those that were accepted.

    Args:
        state: the site's folder of state.
    """

    def __init__(self, state: Path) -> None:
        self._accepted = state / "accepted"
        self._asked = state / "asked"

    def check(self, site: str, digest: str, description: Mapping[str, Any]) -> None:
        """Check that an experiment is accepted; keep its description for the operator otherwise.

        Args:
            site: the site's name.
            digest: the experiment's.
            description: what the server tells of it.

        Raises:
            ConfigError: it is not.
        """
        if (self._accepted / f"{digest}.json").exists():
            return
        text = json.dumps(description, indent=1)
        write_atomically(self._asked / f"{digest}.json", text.encode())
        raise known_error("not_accepted", site=site, experiment=digest)

    def accept(self, digest: str) -> None:
        """Accept an experiment that was asked for.

        Args:
            digest: the experiment's, or its first digits.

        Raises:
            ConfigError: no such experiment was asked for, or several begin like this.
        """
        found = [path for path in self._files(self._asked) if path.stem.startswith(digest)]
        if len(found) != 1:
            known = ", ".join(path.stem for path in self._files(self._asked)) or "none"
            raise ConfigError(
                f"{len(found)} experiments that were asked for begin with {digest!r}; there are: "
                f"{known}"
            )
        write_atomically(self._accepted / found[0].name, found[0].read_bytes())
        found[0].unlink()

    def listed(self) -> dict[str, tuple[bool, dict[str, Any]]]:
        """Return by digest whether an experiment is accepted, and its description."""
        return {
            path.stem: (folder == self._accepted, json.loads(path.read_text(encoding="utf-8")))
            for folder in (self._asked, self._accepted)
            for path in self._files(folder)
        }

    @staticmethod
    def _files(folder: Path) -> list[Path]:
        return sorted(folder.glob("*.json"))
