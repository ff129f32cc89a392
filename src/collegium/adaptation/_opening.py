"""A network that an adaptation ended with, opened again to predict more images."""

from collections.abc import Mapping

from torch import Tensor, nn

from collegium.adaptation._norms import batch_norms, use_batch_statistics
from collegium.adaptation.routing import holds_routers, open_routed


def open_adapted(network: nn.Module, model: Mapping[str, Tensor]) -> nn.Module:
    """Return the network that a model is of, be it an adapter's or a plain one.

    Of `Routing` it mixes weights, and of `Tent` it has no running statistics: both predict by the
    statistics of what they see at once, so give them as many images at once as in the adaptation.
    All other models are those of the network as it is.

    Args:
        network: a new network such as `Sources.network` makes; it is changed and returned.
        model: `Adapted.model`, or what `collegium.models.files.import_model` reads of it.

    Raises:
        ConfigError: the model has routers, and is that of another network.
    """
    if holds_routers(model):
        return open_routed(network, model)
    tracked = [name for name, layer in batch_norms(network).items() if layer.track_running_stats]
    if tracked and not any(f"{name}.running_mean" in model for name in tracked):
        use_batch_statistics(network)
    return network
