"""The rotation task of TTT (Sun et al., 2020, https://arxiv.org/abs/1909.13231).

An image is rotated by 0, 90, 180 or 270 degrees, and a head on the network's encoder predicts the
number of quarter turns. The task needs no labels, so that it can be learnt at any site.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collegium.core.lazy import functional, nn, torch
from collegium.core.model_parts import find_parts, head_layer, monai_unet_levels, require_free_name
from collegium.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.modules.conv import _ConvNd
    from torch.utils.hooks import RemovableHandle

    from collegium.models._rotation_head import RotationHead

ROTATION = "rotation"
"""The name of the head among a network's submodules."""

TURNS = 4
"""The number of quarter turns, which are the classes of the task."""


def attach_rotation_head(module: nn.Module) -> None:
    """Add a `RotationHead` named `ROTATION`, to a network in place.

    It hangs on the encoder's output: the last submodule of ``roles["encoder"]`` where the network
    declares it, the bottom of MONAI's `UNet`, and failing that what enters the network's head. The
    number of channels is that of the last (or first) convolution or linear layer there. Its weights
    come from torch's ambient random state; those of the network stay as they are.

    Raises:
        ConfigError: the network has a submodule or attribute of that name, or no place for it, or
            takes rows of a table.
    """
    from collegium.models._rotation_head import RotationHead
    from collegium.models.tables import TableNetwork

    for table in (layer for layer in module.modules() if isinstance(layer, TableNetwork)):
        raise ConfigError(
            f"{type(table).__name__} takes rows of a table, whose columns cannot be turned; "
            f"choose another algorithm than ttt, or a network for images"
        )
    require_free_name(module, ROTATION)
    find_parts(module)  # refuses roles that are not well declared
    layer, channels = output_layer(module)
    module.add_module(ROTATION, RotationHead(channels).to(layer.weight))


def rotation_head(module: nn.Module) -> RotationHead:
    """Return a network's rotation head.

    Raises:
        ConfigError: it has none.
    """
    from collegium.models._rotation_head import RotationHead

    head = getattr(module, ROTATION, None)
    if not isinstance(head, RotationHead):
        raise ConfigError(
            f"{type(module).__name__} has no rotation head; train it with the algorithm ttt"
        )
    return head


def rotation_logits(module: nn.Module, images: Tensor, *, learn_statistics: bool = True) -> Tensor:
    """Return the output of the rotation head; the decoder of the network does not run.

    Args:
        module: a network with a rotation head, in training or evaluation mode.
        images: (B, C, *spatial).
        learn_statistics: whether running statistics are updated in training mode.

    Returns:
        (B, 4), the logits; column k belongs to k quarter turns.

    Raises:
        ConfigError: the network has no such head, or never runs the encoder's last layer.
    """
    head = rotation_head(module)
    buffers = {} if learn_statistics else {n: b.clone() for n, b in module.named_buffers()}
    hook = _stop_after_encoder(module)
    try:
        torch.func.functional_call(module, buffers, (images,))
    except _EncoderOutput as output:
        return head.logits(*output.args)
    finally:
        hook.remove()
    raise ConfigError(
        f"the last submodule of {type(module).__name__}.roles['encoder'] does not run when the "
        f"network does; name the one that returns the encoder's output"
    )


def crop_square(images: Tensor) -> Tensor:
    """Return the centre of (B, C, *spatial), square in the first two spatial axes.

    Images with fewer than two spatial axes are returned unchanged.
    """
    if images.ndim < 4:
        return images
    side = min(images.shape[2:4])
    for axis in (2, 3):
        images = images.narrow(axis, (images.shape[axis] - side) // 2, side)
    return images


def rotate(images: Tensor, turns: Tensor) -> Tensor:
    """Return (B, C, side, side, ...), each image rotated in the plane of its first two axes.

    A signal (B, C, length) or a vector (B, length) has no plane and counts as a ring, which is
    rotated by shifts of a quarter of its length along the last axis.

    Args:
        images: (B, ...), square in the first two spatial axes.
        turns: (B,), quarter turns, 0 to 3.
    """
    if images.ndim < 4:
        length = images.shape[-1]
        shifts = [count * length // TURNS for count in turns.tolist()]
        return torch.stack([i.roll(shift, -1) for i, shift in zip(images, shifts, strict=True)])
    pairs = zip(images, turns.tolist(), strict=True)
    return torch.stack([torch.rot90(image, count, (1, 2)) for image, count in pairs])


def rotation_loss(
    module: nn.Module, images: Tensor, turns: Tensor, *, learn_statistics: bool = True
) -> Tensor:
    """Rotate images, and return the mean cross-entropy of the rotation task.

    Args:
        module: a network with a rotation head.
        images: (B, C, *spatial), square in the first two spatial axes.
        turns: (B,), int64, the quarter turns of each image.
        learn_statistics: as in `rotation_logits`.
    """
    rotated = rotate(images, turns)
    logits = rotation_logits(module, rotated, learn_statistics=learn_statistics)
    return functional.cross_entropy(logits, turns.to(logits.device))


class _EncoderOutput(Exception):  # noqa: N818  (no error: it ends the forward pass early)
    """Holds the features that the encoder returned."""


def _stop_after_encoder(module: nn.Module) -> RemovableHandle:
    """Add a hook that raises `_EncoderOutput` in the next forward pass."""

    def stop(features: Tensor) -> None:
        raise _EncoderOutput(features)

    last = last_encoder_layer(module)
    if last is None:
        return head_layer(module).register_forward_pre_hook(lambda _, inputs: stop(inputs[0]))
    return last.register_forward_hook(lambda _, inputs, output: stop(output))


def last_encoder_layer(module: nn.Module) -> nn.Module | None:
    """Return the encoder's last layer, or None if the network declares no encoder."""
    declared = getattr(module, "roles", {}).get("encoder")
    if declared:
        return module.get_submodule(declared[-1])
    levels = list(monai_unet_levels(module).values())
    return levels[-1][1].get_submodule("submodule") if levels else None


def output_layer(module: nn.Module) -> tuple[nn.Linear | _ConvNd, int]:
    """Return the layer that determines the channels of the encoder's output, and their number.

    Raises:
        ConfigError: there is no convolution or linear layer.
    """
    last = last_encoder_layer(module)
    place = head_layer(module) if last is None else last
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    layers = [layer for layer in place.modules() if isinstance(layer, kinds)]
    if not layers:
        raise ConfigError(
            f"the encoder of {type(module).__name__} ends with a {type(place).__name__}, which "
            f"has no known channels; name a block with a convolution last in roles['encoder']"
        )
    layer = layers[0] if last is None else layers[-1]
    if isinstance(layer, nn.Linear):
        return layer, layer.in_features if last is None else layer.out_features
    return layer, layer.in_channels if last is None else layer.out_channels
