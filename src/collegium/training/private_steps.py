"""Steps whose gradients are clipped case by case and have Gaussian noise (DP-SGD).

Abadi et al., 2016, https://arxiv.org/abs/1607.00133, Algorithm 1. Gradients of single cases,
clipping and noise are Opacus' (https://opacus.ai). In every step each case takes part with
probability q = batch_size / cases, independently of the others, as the accountant assumes; the sum
of the clipped gradients is divided by the batch size that is expected.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from collegium.core.dataset import Batch
from collegium.core.model_parts import find_parts
from collegium.core.optional import import_optional
from collegium.core.quick_layers import torch_layers
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.tasks import Task
from collegium.training.loop import Fit, correct_gradients, diverged, training_mode
from collegium.training.privacy import EXTRA, PURPOSE, CaseNoise

if TYPE_CHECKING:
    from collegium.training.objectives import LiveNetwork

INPLACE = "inplace"
"""The attribute of activations that overwrite their input."""

LEFT_BY_OPACUS = ("activations", "max_batch_len", "ft_compute_sample_grad")
"""Attributes of layers that an interrupted step leaves behind."""


def take_private_steps(
    call: Fit,
    network: LiveNetwork,
    optimizer: torch.optim.Optimizer,
    correct: Callable[[Tensors, Tensors], Tensors] | None,
    private: CaseNoise,
) -> tuple[float, int]:
    """Take the steps of a fit; return the sum of their losses, and how many there were.

    Args:
        call: the fit, which has as many steps as without privacy.
        network: the network, in training mode.
        optimizer: moves its parameters.
        correct: see `LocalTraining.fit`; it receives the gradient with its noise.
        private: the clipping and the noise.

    Raises:
        DivergedError: the loss became NaN or infinite.
        ConfigError: Opacus is not installed, or cannot compute the gradients of single cases.
    """
    local, count, device = call.local, len(call.data), call.local.device
    wrapped: Any = import_optional("opacus.optimizers", EXTRA, PURPOSE).DPOptimizer(
        optimizer,
        noise_multiplier=private.noise,
        max_grad_norm=private.max_grad_norm,
        expected_batch_size=private.rate * count,
        generator=private.generators("noise", device),
    )
    draws = private.generators("sample")
    total, number = 0.0, 0
    with case_gradients(local.module):
        for number, _ in enumerate(call.plan(), start=1):
            wrapped.zero_grad(set_to_none=True)
            taken = (torch.rand(count, generator=draws) < private.rate).nonzero().flatten()
            samples = [(number, index) for index in taken.tolist()]
            if samples:
                batch = local.draw(call.data, samples, call.seed, call.path)
                losses = case_losses(local.task, network.predict(batch["image"]), batch, samples)
                value = float(losses.detach().mean())
                if not math.isfinite(value):
                    raise diverged(value, number, network.lr)
                total += value
                losses.sum().backward()  # type: ignore[no-untyped-call]
            gather_gradients(network.trained, len(samples))
            wrapped.pre_step()
            if correct:
                correct_gradients(network.trained, correct)
            optimizer.step()
    for parameter in network.trained.values():
        del parameter.summed_grad  # type: ignore[attr-defined]
    return total, number


def case_losses(task: Task, output: Tensor, batch: Batch, cases: Sequence[Any]) -> Tensor:
    """Return the loss of each case alone, whatever the task's loss does with a batch of several.

    Args:
        task: the task.
        output: the network's output.
        batch: its batch, with equally many samples of each case, case by case.
        cases: the cases.

    Returns:
        (cases,).
    """
    each = len(output) // len(cases)
    rows = [slice(start, start + each) for start in range(0, len(output), each)]
    return torch.stack([
        task.loss(output[own], {key: value[own] for key, value in batch.items()}) for own in rows
    ])  # fmt: skip


@contextmanager
def case_gradients(module: nn.Module) -> Iterator[None]:
    """Keep gradients of single samples in ``grad_sample`` of parameters after backward passes.

    The layers are torch's own meanwhile, since Opacus knows only these.

    Args:
        module: the network, in training mode; the parameters that are trained require a gradient.

    Raises:
        ConfigError: Opacus is not installed.
    """
    with torch_layers(module):
        yield from _case_gradients(module)


def _case_gradients(module: nn.Module) -> Iterator[None]:
    """Yield once while Opacus' hooks are in place, and remove what they leave."""
    sampling = import_optional("opacus.grad_sample.grad_sample_module", EXTRA, PURPOSE)
    changed = [layer for layer in module.modules() if getattr(layer, INPLACE, False) is True]
    for layer in changed:  # what a hook has seen must not be changed in place
        setattr(layer, INPLACE, False)
    handles = [
        layer.register_forward_pre_hook(_in_order)
        for layer in module.modules()
        if isinstance(layer, nn.modules.conv._ConvNd)
    ]
    hooks = sampling.GradSampleHooks(module, loss_reduction="sum", strict=False)
    try:
        with warnings.catch_warnings():  # images need no gradient
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            yield
    finally:
        hooks.cleanup()
        for handle in handles:
            handle.remove()
        for layer in changed:
            setattr(layer, INPLACE, True)
        for layer in module.modules():
            for name in LEFT_BY_OPACUS:
                with suppress(AttributeError):
                    delattr(layer, name)


def _in_order(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a convolution's inputs, contiguous: Opacus misreads those that are channels-last."""
    return tuple(each.contiguous() if isinstance(each, Tensor) else each for each in inputs)


def gather_gradients(trained: Mapping[str, nn.Parameter], cases: int) -> None:
    """Make every parameter's ``grad_sample`` one tensor with one row per case.

    Args:
        trained: the parameters, by name.
        cases: how many cases the batch has.

    Raises:
        ConfigError: gradients of single cases are missing or are not those of single cases.
    """
    for name, parameter in trained.items():
        found: Any = parameter.grad_sample  # type: ignore[attr-defined]
        if found is None and (parameter.grad is None or not cases):
            found = parameter.new_zeros(cases, *parameter.shape)
        if not isinstance(found, Tensor) or (len(found) % cases if cases else len(found)):
            raise ConfigError(
                f"{PURPOSE}: Opacus finds no gradient of single cases for {name}, since the "
                f"network uses it in another way than layer by layer and case by case; choose "
                f"another network, or privacy.unit: site"
            )
        if cases:
            found = found.detach().view(cases, -1, *parameter.shape).sum(1)
        parameter.grad_sample = found  # type: ignore[attr-defined]


def check_case_gradients(module: nn.Module, task: Task, batch: Batch) -> None:
    """Check that the gradients of cases in a batch are those of each case alone.

    Args:
        module: the network; its tensors are not changed.
        task: the task.
        batch: a batch of a few cases with one sample each.

    Raises:
        ConfigError: a layer couples the cases of a batch, or Opacus cannot compute its gradients,
            or is not installed.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    cases = range(len(batch["image"]))
    with training_mode(module, trained, find_parts(module).frozen):
        for layer in module.modules():
            if isinstance(layer, nn.modules.dropout._DropoutNd):
                layer.eval()  # it draws other numbers for a case alone
        try:
            with case_gradients(module):
                case_losses(task, module(batch["image"]), batch, cases).sum().backward()  # type: ignore[no-untyped-call]
                gather_gradients(trained, len(cases))
                found = {name: _grad_sample(p) for name, p in trained.items()}
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"{PURPOSE}: Opacus cannot compute the gradients of single cases of this network "
                f"({reason}); choose another network, or privacy.unit: site"
            ) from error
        finally:
            module.zero_grad(set_to_none=True)
        alone = [_gradients_alone(module, trained, task, batch, case) for case in cases]
    for name in trained:
        wanted = torch.stack([gradients[name] for gradients in alone])
        scale = float(wanted.abs().max())
        if not torch.allclose(found[name], wanted, rtol=1e-3, atol=1e-4 * scale + 1e-7):
            raise ConfigError(
                f"{PURPOSE}: the gradient of {name} of one case depends on the other cases of its "
                f"batch, or Opacus cannot compute it; choose another network, or privacy.unit: site"
            )


def check_statistics(module: nn.Module, batch: Batch) -> None:
    """Check that training learns nothing but parameters, and that Opacus knows the layers.

    Args:
        module: the network; its tensors are not changed.
        batch: a batch of a few cases.

    Raises:
        ConfigError: a layer computes with statistics of batches or learns some, or Opacus cannot
            train it as it is, or is not installed.
    """
    validators = import_optional("opacus.validators", EXTRA, PURPOSE).ModuleValidator.VALIDATORS
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch_layers(module), training_mode(module, trained, find_parts(module).frozen):
        for name, layer in module.named_modules():
            if layer.training and isinstance(layer, nn.modules.batchnorm._BatchNorm):
                raise ConfigError(
                    f"{PURPOSE}: {name} is {type(layer).__name__}, a batch normalisation, by which "
                    f"the cases of a batch depend on each other, and whose statistics no noise "
                    f"covers; use group or instance normalisation (nn.GroupNorm; in built-in "
                    f"networks norm: group or instance, in mlp norm: none)"
                )
            if layer.training and validators.get(type(layer), lambda _: [])(layer):
                raise ConfigError(
                    f"{PURPOSE}: {name} is {type(layer).__name__}, which cannot be trained "
                    f"privately as it is; choose another network or layer"
                )
        with torch.no_grad():
            module(batch["image"])
    learnt = [name for name, buffer in module.named_buffers() if not buffer.equal(before[name])]
    for name, buffer in module.named_buffers():
        buffer.copy_(before[name])
    if learnt:
        raise ConfigError(
            f"{PURPOSE}: training changes {learnt[0]}, which is no parameter, so that no noise "
            f"covers what it tells of the cases; choose another network or layer"
        )


def _gradients_alone(
    module: nn.Module, trained: Mapping[str, nn.Parameter], task: Task, batch: Batch, case: int
) -> dict[str, Tensor]:
    own = {key: value[case : case + 1] for key, value in batch.items()}
    loss = task.loss(module(own["image"]), own)
    found = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
    return {
        name: torch.zeros_like(p) if gradient is None else gradient
        for (name, p), gradient in zip(trained.items(), found, strict=True)
    }


def _grad_sample(parameter: nn.Parameter) -> Tensor:
    found: Tensor = parameter.grad_sample  # type: ignore[attr-defined]
    return found
