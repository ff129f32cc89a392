"""What an experiment file says of codecs."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CodecConfig:
    """A codec.

    Attributes:
        name: A built-in name, `file.py:Class` or `package.module:Class`.
        params: Its hyper-parameters.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Give the mapping that a file would hold."""
        return {"name": self.name, **self.params}


@dataclass(frozen=True)
class CodingConfig:
    """The codecs of both directions; null: nothing is coded.

    Attributes:
        up: What codes the messages of the sites.
        down: What codes the messages of the server.
    """

    up: CodecConfig | None = None
    down: CodecConfig | None = None

    def to_dict(self) -> dict[str, Any]:
        """Give the mapping that a file would hold."""
        return {
            "up": self.up.to_dict() if self.up else None,
            "down": self.down.to_dict() if self.down else None,
        }
