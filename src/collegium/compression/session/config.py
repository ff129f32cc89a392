"""The settings of codecs in an experiment file."""

from dataclasses import field
from typing import Any

from collegium.core.settings import settings


@settings
class CodecConfig:
    """A codec.

    Attributes:
        name: A built-in name, `file.py:Class` or `package.module:Class`.
        params: Its hyper-parameters.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping that a file would hold."""
        return {"name": self.name, **self.params}


@settings
class CodecsConfig:
    """The codecs of both directions; null: nothing is coded.

    Attributes:
        up: Codes the messages of the sites.
        down: Codes the messages of the server.
    """

    up: CodecConfig | None = None
    down: CodecConfig | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping that a file would hold."""
        return {
            "up": self.up.to_dict() if self.up else None,
            "down": self.down.to_dict() if self.down else None,
        }
