"""Initial weights from a file, such as those of a network that was trained elsewhere."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection
from dataclasses import field
from pathlib import Path

from collegium.core.settings import settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.models.lora import name_without_adapters

logger = logging.getLogger(__name__)


@settings
class InitialWeights:
    """The file that the common initial model comes from.

    Attributes:
        file: a safetensors file or a torch state dict; empty at a site of a federation over a
            network, which receives the model.
        rename: beginnings of names in the file, and what the network calls them instead; "" stands
            for nothing. The longest that fits counts.
        partly: whether tensors that the file lacks, or has in another shape, keep the weights that
            the network draws. Otherwise they are refused.
        digest: SHA-256 of the file, filled in when an experiment is read: a run keeps to it.
    """

    file: str = ""
    rename: dict[str, str] = field(default_factory=dict)
    partly: bool = False
    digest: str = ""

    def read(self) -> Tensors:
        """Return the file's tensors under the names of the network.

        Raises:
            ConfigError: the file is another one than when the run began, or two of its tensors get
                one name.
            CheckpointError: the file is damaged, or holds no model.
            StorageError: the file cannot be read.
        """
        from collegium.models.files import import_model

        path = Path(self.file)
        if self.digest and digest_of_file(path) != self.digest:
            raise ConfigError(
                f"initial_weights: {path} is not the file that the run began with; put that one "
                f"back, or choose another output folder"
            )
        renamed: dict[str, str] = {}
        model = import_model(path)
        for name in model:
            new = self._renamed(name)
            if new in renamed:
                raise ConfigError(
                    f"initial_weights: {renamed[new]!r} and {name!r} of {path} would both be "
                    f"{new!r}; correct rename"
                )
            renamed[new] = name
        return Tensors((new, model[name]) for new, name in renamed.items())

    def _renamed(self, name: str) -> str:
        fitting = [start for start in self.rename if name.startswith(start)]
        if not fitting:
            return name
        longest = max(fitting, key=len)
        return self.rename[longest] + name.removeprefix(longest)

    def put_into(self, model: Tensors, added: Collection[str] = ()) -> Tensors:
        """Return an initial model with the file's weights, in the types of the model.

        Args:
            model: the whole model, as the network draws it.
            added: the names of what an algorithm has added, which stays as it is, as low-rank
                adapters do that the file lacks.

        Raises:
            ConfigError: the file lacks a tensor, or has it in another shape, and ``partly`` is
                false; or no tensor fits.
        """
        found = _under_names_of(model, self.read())
        adapters = {n for n in model if name_without_adapters(n) is None and n not in found}
        names = [name for name in model if name not in {*added, *adapters}]
        fitting = [n for n in names if n in found and found[n].shape == model[n].shape]
        other = [n for n in names if n not in set(fitting)]
        if not fitting or (other and not self.partly):
            n = other[0]
            what = (
                f"has {n!r} as {tuple(found[n].shape)}, and the network as {tuple(model[n].shape)}"
                if n in found
                else f"has no {n!r}, but {', '.join(sorted(found)[:3])} and so on"
            )
            raise ConfigError(
                f"initial_weights: {self.file} {what} ({len(other)} of {len(names)} tensors do not "
                f"fit); map its names by rename, or set partly to true to keep the network's own"
            )
        if other:
            logger.warning(
                "%d of %d tensors start from the file of initial_weights; the network draws %s%s",
                len(fitting),
                len(names),
                ", ".join(other[:5]),
                " and others" if len(other) > 5 else "",
            )
        return model | Tensors((n, found[n].to(model[n])) for n in fitting)


def _under_names_of(model: Tensors, found: Tensors) -> Tensors:
    """Return a file's tensors by the names of a network, whose layers may have adapters."""
    names = {
        plain: name
        for name in model
        if name not in found and (plain := name_without_adapters(name)) in found
    }
    return Tensors((names.get(name, name), tensor) for name, tensor in found.items())


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal digits.

    Args:
        path: the file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(
            f"initial_weights: {path} cannot be read ({error.strerror}); correct the path"
        ) from error
