"""Asks every site about its data, under the same egress policy as in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from collegium.core.algorithm import Algorithm, Client, Server, handler
from collegium.core.message import Message
from collegium.core.payloads import PartSchema
from collegium.experiment.config.experiment import ExperimentConfig, parse_config, to_dict
from collegium.experiment.federation import open_configured, stored_splits
from collegium.experiment.preflight import check_engine
from collegium.heterogeneity.embeddings import make_encoder
from collegium.heterogeneity.survey import (
    Summary,
    SurveyMixin,
    SurveyQuestions,
    site_statistics,
    survey_parts,
)
from collegium.runtime import process
from collegium.runtime.client import ClientRuntime
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.federation import Federation
from collegium.runtime.ledger import describe_part
from collegium.runtime.participation import SKIPPING
from collegium.runtime.requests import Transport

FOLDER = "assessment"
"""Where in an experiment's output folder the assessment is."""

ASKED = ("intensity_maxima", "label_volumes", "label_histogram", "embeddings", "components")
"""What a report shows, and a site is asked for."""


class RemoteSites(Protocol):
    """Sites that are asked over a network."""

    def federation_to_survey(self) -> Federation:
        """Return the federation, of whose sites only the names are known."""

    def survey_transport(self) -> Transport:
        """Return what carries the survey to the sites that train."""


@dataclass(frozen=True)
class Assessment(SurveyMixin, Algorithm):
    """A survey without training: every site sends what its policy lets out.

    Attributes:
        summary: see `collegium.heterogeneity.survey.SurveyQuestions`.
        bins: see there.
        encoder: see there.
        grid: see there.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = survey_parts(*ASKED)

    summary: Summary = "cases"
    bins: int = 32
    encoder: str = ""
    grid: int = 64

    def __post_init__(self) -> None:
        self.questions()

    def questions(self) -> SurveyQuestions:
        """Ask for all that the report shows."""
        return SurveyQuestions(ASKED, self.summary, self.bins, encoder=self.encoder, grid=self.grid)

    def round(self, server: Server) -> None:
        """Nothing is trained."""

    @handler
    def survey(self, client: Client, request: Message) -> Message:
        """Send what the site's policy lets out, and leave out the rest. See `Assessment`.

        A site that withholds embeddings withholds what else is made of the same feature maps.

        Args:
            client: the site.
            request: nothing; both sides know the questions.
        """
        questions = self.questions()
        allowed = tuple(
            part
            for part in questions.parts
            if client.may_send(part) and (part != "components" or client.may_send("embeddings"))
        )
        return Message(site_statistics(client, replace(questions, parts=allowed)))


def survey_sites(
    config: ExperimentConfig, survey: Assessment, remote: RemoteSites | None = None
) -> tuple[Mapping[str, Message], dict[str, dict[str, Any]]]:
    """Ask all inside sites at once; one that fails is left out.

    The sites' ledgers are in the folder of the assessment, below ``clients``.

    Args:
        config: the experiment, whose sites are asked.
        survey: what they are asked for.
        remote: the sites, if they are not on this machine.

    Returns:
        By site its answer, without the sites that failed; and by site the parts that left it with
        their bytes, the parts withheld, the bytes of the whole message, and why it failed if it
        did.

    Raises:
        ConfigError: the engine or the network cannot be used.
        DataError: a site's files are unusable.
    """
    process.prepare(config.engine.threads)
    check_engine(config)
    make_encoder(survey.encoder)
    if remote is not None:
        federation, transport = remote.federation_to_survey(), remote.survey_transport()
    else:
        federation = open_configured(config, splits=stored_splits(config))
        transport = _local_transport(config, survey, federation)
    seed, root = config.seeds[0], Path(config.output) / FOLDER
    server = federation.server(survey, transport, seed=seed, root=root, participation=SKIPPING)
    try:
        replies = server.evaluate(survey.survey)
    finally:
        transport.close()
    failed = {entry["client"]: entry["why"] for entry in server.left_out}
    wanted = survey.questions().parts
    exchanged = {}
    for site in server.clients:
        reply = replies.get(site, Message.of())
        sent = [part for part in wanted if part in reply]
        exchanged[site] = {
            "parts": {part: describe_part(reply[part])["bytes"] for part in sent},
            "withheld": [] if site in failed else [part for part in wanted if part not in reply],
            "bytes_up": server.client_stats[site].bytes_up,
            "failed": failed.get(site, ""),
        }
    return replies, exchanged


def _local_transport(
    config: ExperimentConfig, survey: Assessment, federation: Federation
) -> Transport:
    """Return what carries the survey to the sites of this machine."""
    engine = config.engine
    build = partial(clients_to_survey, config, survey, federation)
    if engine.workers > 1:  # these open the federation themselves
        build = partial(survey_clients, to_dict(config), survey.hyperparameters())
    gpus = process.shared_gpus(engine.device)
    return InProcess(build, engine.workers, engine.threads, gpus=gpus)


def clients_to_survey(
    config: ExperimentConfig, survey: Assessment, federation: Federation
) -> dict[str, ClientRuntime]:
    """Return the clients that answer a survey, with their ledgers in the assessment's folder.

    Args:
        config: the experiment.
        survey: what they are asked for.
        federation: the opened sites.
    """
    root = Path(config.output) / FOLDER
    return federation.clients(survey, seed=config.seeds[0], root=root)


def survey_clients(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, ClientRuntime]:
    """Return the clients, as a worker process builds them.

    Args:
        data: the experiment as plain data.
        options: the fields of the `Assessment`.
    """
    config = parse_config(data)
    federation = open_configured(config, splits=stored_splits(config))
    return clients_to_survey(config, Assessment(**options), federation)
