"""Models as files: reading pretrained models, writing the models of a run.

Files are written as safetensors with one tensor for each memory: if several names share one (tied
weights), it is stored under the first, and the entry ``ties`` of the file's metadata is a JSON
mapping from each other name to the first. Readers that do not know the entry find all names but
those.
"""

import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from collegium.core.files import write_atomically
from collegium.core.seals import check_seal, seal_tensors
from collegium.core.tensors import Tensors
from collegium.errors import CheckpointError, StorageError

logger = logging.getLogger(__name__)

TIES = "ties"
"""The metadata entry that maps names to the names whose tensors they share."""

WRAPPERS = ("model", "state_dict")
"""Keys under which training code commonly stores the weights."""

PREFIX = "module."
"""The prefix that `DataParallel` adds to every name."""


def import_model(path: Path) -> Tensors:
    """Read a model from a safetensors file or a torch state dict.

    A state dict may be stored under "model" or "state_dict". Names that share memory still do
    afterwards. A prefix "module." of all names is removed, with a warning in the log.

    Raises:
        CheckpointError: the file is damaged, or holds no model.
        StorageError: the file cannot be read.
    """
    return _whole_model(_read_torch(path) if _is_torch(path) else _read_safetensors(path), path)


def import_safetensors(path: Path) -> Tensors:
    """Read a model from a safetensors file, otherwise as `import_model` does.

    Raises:
        CheckpointError: the file is damaged, or is no safetensors file.
        StorageError: the file cannot be read.
    """
    if _is_torch(path):
        raise CheckpointError(f"{path} is a PyTorch file; convert it to safetensors")
    return _whole_model(_read_safetensors(path), path)


def _whole_model(items: Any, path: Path) -> Tensors:
    """Return the state dict in a file's content, without a `PREFIX` that all names have."""
    model = Tensors(_state_dict(items, path))
    if all(name.startswith(PREFIX) for name in model):
        logger.warning(
            "%s: all %d names carry 'module.' (saved from DataParallel); the prefix was removed",
            path, len(model),
        )  # fmt: skip
        model = Tensors((name.removeprefix(PREFIX), tensor) for name, tensor in model.items())
    return model


def export_model(model: Tensors, path: Path) -> None:
    """Write a model as safetensors, atomically, and sealed; see `collegium.core.seals`.

    Args:
        model: the model; tensors that share memory are stored once.
        path: the file.

    Raises:
        StorageError: the disk is full or not writable.
    """
    ties = {name: first for name, first in model.first_names().items() if first != name}
    stored = {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in model.without(ties).items()
    }
    metadata = {"format": "pt"} | ({TIES: json.dumps(ties)} if ties else {})
    data = safetensors.torch.save(stored, metadata=metadata)
    write_atomically(path, *seal_tensors(data))


def _is_torch(path: Path) -> bool:
    """Return whether `torch.save` wrote a file, which then begins as a zip archive or a pickle.

    A safetensors file begins with the size of its header, which may look like the start of a
    pickle, but is below 2^32, and the header is JSON.
    """
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}; correct the path") from error
    return start.startswith((b"PK\x03\x04", b"\x80")) and start[4:] != b"\0\0\0\0{"


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged (cut short or overwritten); copy it again or take another one"
    )


def _read_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():  # about pickles that torch did not write
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for files that it cannot read
        if "Unsupported" in str(error):
            raise CheckpointError(
                f"{path} holds more than tensors and plain values, which is not loaded because it "
                f"could run code; save its state_dict() alone"
            ) from error
        raise _damaged(path) from error


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        data = path.read_bytes()
        check_seal(data)
        items = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        ties = json.loads(header.get("__metadata__", {}).get(TIES, "{}"))
        return items | {name: items[holder] for name, holder in ties.items()}
    except (safetensors.SafetensorError, ValueError, KeyError, AttributeError) as error:
        raise _damaged(path) from error


def _state_dict(items: Any, path: Path) -> Mapping[str, torch.Tensor]:
    """Find the state dict, alone or under one of `WRAPPERS`."""
    for key in WRAPPERS:
        if isinstance(items, Mapping) and isinstance(items.get(key), Mapping):
            items = items[key]
            break
    if not isinstance(items, Mapping) or not items:
        raise CheckpointError(f"{path} holds no state dict; save the network's state_dict()")
    for name, value in items.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path}: {name!r} is a {type(value).__name__} where a tensor belongs; save the "
                f"network's state_dict()"
            )
    return {name: value.detach() for name, value in items.items()}
