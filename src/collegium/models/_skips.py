"""MONAI's skip connection with our concatenation."""

from monai.networks.layers.simplelayers import SkipConnection
from torch import Tensor, nn

from collegium.core.quick_operators import concatenate


class QuickSkipConnection(SkipConnection):
    """A skip connection whose gradients are added up in less time; see `concatenate`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, and what the submodule makes of it, side by side in their channels.

        Args:
            x: (B, C, *spatial).
        """
        return concatenate(x, self.submodule(x))


def use_quick_skips(module: nn.Module) -> None:
    """Replace the skip connections of a network that concatenate channels, in place.

    Args:
        module: a network of MONAI's.
    """
    for layer in module.modules():
        if type(layer) is SkipConnection and (layer.mode, layer.dim) == ("cat", 1):
            layer.__class__ = QuickSkipConnection
