"""Local training of several sites in one loop, vectorised over them by `torch.func.vmap`.

The steps of small networks consist of many short operations, and calling them takes longer than
computing. Sites that train networks, batches and numbers of steps of equal shapes do it in the
calls that one of them would make, each on its own batches from its own generators. Results equal
those of separate training up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from collegium.core.dataset import Batch, join
from collegium.core.model_parts import has_convolutions
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.training.loop import (
    Fit,
    LocalTraining,
    Progress,
    TrainingConfig,
    diverged,
    restore_state,
    state_by_name,
    training_mode,
)

Outcome: TypeAlias = "tuple[Tensors, Progress] | Exception"


def check_together(module: nn.Module, config: TrainingConfig) -> None:
    """Check that sites can train a network together, and that it is any use.

    Args:
        module: the network.
        config: the recipe.

    Raises:
        ConfigError: they cannot, or it has convolutions, which are slower together.
    """
    dropout = nn.modules.dropout._DropoutNd
    if has_convolutions(module):
        found = "convolutions, which are slower together"
    elif any(isinstance(layer, dropout) and layer.p > 0 for layer in module.modules()):
        found = "dropout, whose draws would be others"
    elif config.precision != "fp32" or config.compile == "on":
        raise ConfigError(
            "engine.together is true, and sites train together in float32 without compiling only: "
            "set training.precision to fp32 and training.compile to off, or it to false"
        )
    elif (privacy := config.privacy) and privacy.unit == "case" and not privacy.is_plain:
        raise ConfigError(
            "engine.together is true, and sites with training.privacy of single cases train apart; "
            "set it to false"
        )
    else:
        return
    raise ConfigError(f"engine.together is true, and the network has {found}; set it to false")


def fit_all(fits: Sequence[Fit]) -> list[Outcome]:
    """Return what each call returns or raises; those of equal shapes are done together.

    Args:
        fits: the calls, of one network.
    """
    outcomes: list[Outcome] = []
    groups: dict[Any, list[_Planned]] = {}
    for number, fit in enumerate(fits):
        outcomes.append(ConfigError("not trained"))
        try:
            planned = _Planned(number, fit)
        except Exception as error:  # raised where the fit was called
            outcomes[number] = error
        else:
            groups.setdefault(planned.shapes, []).append(planned)
    for group in groups.values():
        found = [_outcome_alone(group[0].fit)] if len(group) == 1 else _outcomes_together(group)
        for planned, outcome in zip(group, found, strict=True):
            outcomes[planned.number] = outcome
    return outcomes


def _outcome_alone(fit: Fit) -> Outcome:
    try:
        return fit.alone()
    except Exception as error:  # raised where the fit was called
        return error


def _outcomes_together(group: Sequence[_Planned]) -> list[Outcome]:
    try:
        return _Loop(group).run()
    except Exception as error:  # raised wherever one of the fits was called
        return [error] * len(group)


class _Planned:
    """A fit with its start, its batches, and the shapes that those of its group share."""

    def __init__(self, number: int, fit: Fit) -> None:
        self.number, self.fit = number, fit
        local = fit.local
        local.load(fit.model)
        self.start = local.current()
        plan = [*fit.plan()]
        drawn = (local.draw(fit.data, samples, fit.seed, fit.path) for samples in plan)
        first = next(drawn)
        self.batches: Iterator[Batch] = chain([first], drawn)
        kinds = {name: (value.dtype, value.shape) for name, value in sorted(first.items())}
        counts = tuple(map(len, plan))
        steps = _steps_of(fit.optimizer_state)
        self.shapes = (id(local.task), fit.lr, counts, *kinds.items(), *steps)


def _steps_of(state: Mapping[str, Any] | None) -> Iterator[Any]:
    """Yield what must be equal for one optimiser to continue several states."""
    yield state is None
    for name, tensors in sorted((state or {}).items()):
        yield name, *sorted(tensors), float(tensors.get("step", 0))


@dataclass
class _Loop:
    """One training loop of several sites; every tensor has an axis of sites in front."""

    group: Sequence[_Planned]
    trained: dict[str, nn.Parameter] = field(init=False)
    others: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        module = self.local.module
        stacked = _stack([planned.start for planned in self.group])
        named = dict(chain(module.named_parameters(), module.named_buffers()))
        self.trained = {
            name: nn.Parameter(stacked[name]) for name, own in named.items() if own.requires_grad
        }
        self.others = {
            name: stacked[name]
            for name in named
            if name in stacked.keys() - self.trained.keys()  # a buffer may be no part of the model
        }

    @property
    def local(self) -> LocalTraining:
        return self.group[0].fit.local

    def run(self) -> list[Outcome]:
        local, fits = self.local, [planned.fit for planned in self.group]
        config, lr = local.config, fits[0].lr
        optimizer = config.build_optimizer(self.trained, lr, local.undecayed)
        states = [fit.optimizer_state for fit in fits]
        if first := states[0]:
            stacked = {name: _stack_state([s[name] for s in states if s]) for name in first}
            restore_state(optimizer, self.trained, stacked)
        totals, failed, taken = [0.0] * len(fits), dict[int, Exception](), 0
        own = {name: p for name, p in local.module.named_parameters() if p.requires_grad}
        with training_mode(local.module, own, local.parts.frozen):
            batches = zip(*(planned.batches for planned in self.group), strict=True)
            for taken, drawn in enumerate(batches, start=1):
                values = self._step(drawn, optimizer)
                totals = [total + value for total, value in zip(totals, values, strict=True)]
                for site, value in enumerate(values):
                    if not math.isfinite(value):
                        failed.setdefault(site, diverged(value, taken, lr))
        self._keep_states(optimizer, states)
        models = self._models()
        return [
            failed.get(site) or (model, Progress(totals[site] / max(taken, 1), taken))
            for site, model in enumerate(models)
        ]

    def _step(self, drawn: Sequence[Batch], optimizer: torch.optim.Optimizer) -> list[float]:
        """Take one step at every site, and return the losses before it."""
        local = self.local
        joined, sites = join(drawn), len(drawn)
        batch = {n: value.view(sites, -1, *value.shape[1:]) for n, value in joined.items()}
        if batch["image"].shape[1] == 1:
            local.normalise_by_running_statistics()

        def loss(tensors: dict[str, Tensor], own: Batch) -> Tensor:
            return local.task.loss(functional_call(local.module, tensors, (own["image"],)), own)

        optimizer.zero_grad(set_to_none=True)
        try:
            losses: Tensor = vmap(loss)({**self.trained, **self.others}, batch)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"the sites cannot train together ({reason}); set engine.together to false and "
                f"choose another output folder"
            ) from error
        losses.sum().backward()  # type: ignore[no-untyped-call]
        if local.config.clip_norm is not None:
            clip_each([*self.trained.values()], local.config.clip_norm)
        optimizer.step()
        values: list[float] = losses.tolist()
        return values

    def _keep_states(
        self, optimizer: torch.optim.Optimizer, states: Sequence[dict[str, Any] | None]
    ) -> None:
        """Replace the states of the optimisers of those that keep them."""
        if states[0] is None:
            return
        stacked = state_by_name(optimizer, self.trained)
        for site, state in enumerate(states):
            assert state is not None
            state.clear()
            state |= {
                name: Tensors(
                    (key, (value if key == "step" else value[site]).clone())
                    for key, value in tensors.items()
                )
                for name, tensors in stacked.items()
            }

    def _models(self) -> list[Tensors]:
        """Return the model of every site, with all names of a tensor that has several."""
        names = {
            id(own): name
            for name, own in chain(
                self.local.module.named_parameters(), self.local.module.named_buffers()
            )
        }
        tensors: dict[str, Tensor] = {**self.trained, **self.others}
        whole = {
            alias: tensors[names[id(own)]].detach()
            for alias, own in self.local.module.state_dict(keep_vars=True).items()
        }
        return [
            Tensors((name, value[site].clone()) for name, value in whole.items())
            for site in range(len(self.group))
        ]


def clip_each(parameters: Sequence[nn.Parameter], largest: float) -> None:
    """Scale the gradients of every site to a largest Euclidean norm, as torch does it for one.

    Args:
        parameters: the parameters; their first axis, and that of their gradients, counts the sites.
        largest: the norm.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients]
    factors = (largest / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1)
    for gradient in gradients:
        gradient *= factors.view(-1, *[1] * (gradient.dim() - 1))


def _stack(models: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([model[name] for model in models]) for name in models[0]}


def _stack_state(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the states of a parameter's optimisers as one; they have taken equal steps."""
    stacked = _stack(states)
    return {key: states[0][key] if key == "step" else value for key, value in stacked.items()}
