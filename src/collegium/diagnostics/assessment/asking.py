"""Ask every site about its data, over the same border as in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from collegium.core.algorithm import Algorithm, Client, Server, handler
from collegium.core.message import Message
from collegium.core.payloads import Part
from collegium.data.federation import open_federation, sites_of
from collegium.data.site import Site
from collegium.experiment.config.building import task_of
from collegium.experiment.config.experiment import ExperimentConfig, parse_config, to_dict
from collegium.experiment.jobs import cache_folder
from collegium.experiment.preflight import check_engine
from collegium.heterogeneity.survey import (
    PARTS,
    Inquiry,
    Summary,
    Surveyed,
    answers,
    asks,
    make_encoder,
)
from collegium.models.factory import build_model
from collegium.runtime import process
from collegium.runtime.client import ClientRuntime
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.ledger import describe
from collegium.runtime.simulation import build_clients, build_run

FOLDER = "assessment"
"""Where in an experiment's output folder the assessment is."""

ASKED = ("intensity_maxima", "label_volumes", "label_histogram", "embeddings")
"""What a report shows, and a site is asked for."""


@dataclass(frozen=True)
class Assessment(Surveyed, Algorithm):
    """A survey without training: every site tells what its policy lets it tell.

    Attributes:
        summary: see `collegium.heterogeneity.survey.Inquiry`.
        bins: see there.
        encoder: see there.
        grid: see there.
    """

    sends: ClassVar[Mapping[str, Part]] = asks(*ASKED)

    summary: Summary = "cases"
    bins: int = 32
    encoder: str = ""
    grid: int = 64

    def __post_init__(self) -> None:
        self.inquiry()

    def inquiry(self) -> Inquiry:
        """Ask for all that the report shows."""
        return Inquiry(ASKED, self.summary, self.bins, encoder=self.encoder, grid=self.grid)

    def round(self, server: Server) -> None:
        """Nothing is trained."""

    @handler
    def survey(self, client: Client, request: Message) -> Message:
        """Answer what the site's policy lets out, and leave out the rest."""
        inquiry = self.inquiry()
        allowed = tuple(part for part in inquiry.parts if client.may_send(part))
        return Message(answers(client, replace(inquiry, parts=allowed)))


@dataclass(frozen=True)
class Told:
    """What the sites told.

    Attributes:
        replies: by site what it answered; a site that failed is not among them.
        exchanged: by site the parts that left it with their bytes, the parts withheld, the bytes of
            the whole message, and why it failed where it did.
    """

    replies: Mapping[str, Message]
    exchanged: Mapping[str, Mapping[str, Any]]


def ask_sites(config: ExperimentConfig, survey: Assessment) -> Told:
    """Ask all inside sites at once; one that fails is left out.

    The sites' ledgers are in the folder of the assessment, below ``clients``.

    Raises:
        ConfigError: the engine or the network cannot be used.
        DataError: a site's files are unusable.
    """
    process.prepare(config.engine.threads)
    check_engine(config)
    surveyed_sites(config)  # what nobody could answer with is told before anybody is asked
    make_encoder(survey.encoder)
    transport = InProcess(
        partial(survey_clients, to_dict(config), survey.hyperparameters()),
        config.engine.workers,
        config.engine.threads,
    )
    server = build_run(
        survey,
        sites_of(config.federation),
        partial(build_model, config.model.name, **config.model.params),
        transport,
        rounds=1,
        metric="",
        seed=config.seeds[0],
        root=Path(config.output) / FOLDER,
        on_failure="skip",
    ).server
    try:
        replies = server.evaluate(survey.survey)
    finally:
        transport.close()
    failed = {entry["client"]: entry["why"] for entry in server.left_out}
    wanted = survey.inquiry().parts
    exchanged = {}
    for site in server.clients:
        told = replies.get(site, Message.of())
        exchanged[site] = {
            "parts": {part: describe(told[part])["bytes"] for part in wanted if part in told},
            "withheld": [] if site in failed else [part for part in wanted if part not in told],
            "bytes_up": server.traffic[site].bytes_up,
            "failed": failed.get(site, ""),
        }
    return Told(replies, exchanged)


def says(part: str) -> str:
    """Return what a part is, in a few words."""
    return PARTS[part].says


def surveyed_sites(config: ExperimentConfig) -> dict[str, Site]:
    """Open the inside sites, with the splits of a run in the output folder where there is one.

    The splits that are drawn here otherwise are those that a run would draw; nothing is stored, so
    that a run may still be configured otherwise.
    """
    stored = Path(config.output) / "splits"
    return open_federation(
        config.federation, cache_folder(), 0, stored if stored.is_dir() else None
    )


def survey_clients(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, ClientRuntime]:
    """Build the clients from the configuration as plain data, as a worker process does."""
    config = parse_config(data)
    return build_clients(
        Assessment(**options),
        surveyed_sites(config),
        partial(build_model, config.model.name, **config.model.params),
        task_of(config),
        config.training,
        seed=config.seeds[0],
        root=Path(config.output) / FOLDER,
        device=config.engine.device,
    )
