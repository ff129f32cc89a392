"""A site process that unpacks the model it is sent, and packs and sends it back, without data."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from collegium.core.message import pack, unpack
from collegium.data.federation_config import SiteConfig
from collegium.distributed.site import SiteProcess, SiteSettings


class PackingSite(SiteProcess):
    """A site process whose answer is the model that it is sent."""

    def answer(self, header: Mapping[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        """Return the model as a client's reply would hold it.

        Args:
            header: the call's.
            data: its payload.
        """
        return {}, pack({"reply": {"model": unpack(data)["model"], "num_examples": 1}})


if __name__ == "__main__":
    state = Path(sys.argv[1]).parent
    PackingSite(SiteSettings(state.name, SiteConfig(remote=True), state=str(state))).serve()
