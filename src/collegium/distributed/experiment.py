"""An experiment whose sites are elsewhere: the same jobs, results and report, over FLARE."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from collegium.adaptation import outside
from collegium.compression.session.groups import RESEND_REQUEST
from collegium.core.dataset import ConcatDataset
from collegium.core.failures import kind_and_sentence
from collegium.core.files import write_atomically
from collegium.core.message import pack, unpack
from collegium.core.payloads import LARGEST_COUNT, check_rows
from collegium.core.seals import read_sealed, seal_json
from collegium.data.federation_config import sites_of
from collegium.data.public import open_public
from collegium.data.site import Site, never_labelled
from collegium.diagnostics.assessment.survey import Assessment
from collegium.distributed.answers import checked_account, checked_pictures
from collegium.distributed.connection import Answer, Call, Connection
from collegium.distributed.description import describe, digest
from collegium.distributed.jobs import Coordinator
from collegium.distributed.kits import Kit, read_kit
from collegium.distributed.processes import PROGRESS, SOCKET
from collegium.errors import (
    CollegiumError,
    ConfigError,
    MissingReply,
    ProtocolError,
)
from collegium.evaluation import sent_estimates
from collegium.evaluation.report.overlays import write_index
from collegium.experiment.config.building import network_of, task_of
from collegium.experiment.config.experiment import AdapterConfig, ExperimentConfig
from collegium.experiment.federation import OpenedExperiment, cache_folder, start_of
from collegium.experiment.grid import Job, folds_of, masks_means
from collegium.experiment.job_results import (
    ACCOUNT_FILE,
    DEPLOYED,
    SCORES_FILE,
)
from collegium.experiment.jobs import Event
from collegium.experiment.scaling import ASK_AGAIN, FILE
from collegium.runtime.federation import Federation
from collegium.runtime.ledger import SignOff
from collegium.runtime.requests import Request, Response, Transport
from collegium.runtime.run import Run
from collegium.runtime.secure.identity import Identity, read_identity
from collegium.runtime.selection import FEDERATION
from collegium.runtime.server import RETRY_PAUSE
from collegium.tasks import metrics_of

logger = logging.getLogger(__name__)


class RemoteExperiment(OpenedExperiment):
    """An experiment that asks its sites over FLARE; no file of theirs is opened here.

    Args:
        config: the experiment, whose `engine.folder` holds the kits of the server and of the
            administrator.
        survey: what the sites are asked before any training, instead of training; see `assess`.

    Raises:
        ConfigError: the kits are not there or not valid, or the experiment cannot travel.
    """

    def __init__(self, config: ExperimentConfig, survey: Assessment | None = None) -> None:
        engine = config.engine
        if (engine.workers, engine.jobs) != (1, 1):
            raise ConfigError("engine.workers and engine.jobs are for inprocess: leave them at 1")
        if engine.folder is None:
            raise ConfigError(
                "engine.folder is missing: name the folder that 'collegium federation init' made"
            )
        self._description = describe(config, survey)
        server = read_kit(Path(engine.folder) / "server", "server")
        super().__init__(config, identity=_identity_of(config, server, digest(self._description)))
        coordinator = Coordinator(read_kit(Path(engine.folder) / "admin", "admin"))
        unknown = sorted(set(config.federation.sites) - set(server.sites))
        if unknown:
            raise ConfigError(
                f"there is no start-up kit for {', '.join(unknown)}; make one with 'collegium "
                f"federation init', or correct the name"
            )
        self._connection = Connection(
            coordinator,
            server.folder / SOCKET,
            config.federation.sites,
            deadline=engine.deadline,
            patience=engine.patience,
        )
        self._progress = server.folder / PROGRESS
        self._shares: dict[str, set[str]] | None = None
        self._cases: dict[str, dict[str, int]] = {}

    def variation(self, name: str, part: int = 0) -> Federation:
        """Return the federation of a variation, of whose sites only the names are known.

        Args:
            name: The variation's name.
            part: The fold of the patients that is the test, which only the sites know.
        """
        config, nothing = self.variations[name], ConcatDataset([])
        sites = {
            site: Site(site, nothing, nothing, nothing, declared=self._declared(site, name))
            for site in config.federation.sites
        }
        return Federation(
            sites,
            network_of(config),
            task_of(config),
            config.training,
            start=start_of(config),
            public=open_public(config.federation, cache_folder()),
            identity=self._identity,
        )

    def _declared(self, site: str, variation: str) -> int:
        """Return how many cases a site said at the start that it has; any number if it did not."""
        return self._cases.get(site, {}).get(variation, LARGEST_COUNT)

    def check(self) -> None:
        """Check here, and at every site, what can be known to fail before the first round.

        Raises:
            CollegiumError: in one sentence, what would fail.
        """
        super().check()
        calls = (self._call(site, "open") for site in sorted(self.config.federation.sites))
        shares: dict[str, set[str]] = {}
        labelled: dict[str, list[str]] = {}
        failures: list[CollegiumError] = []
        for answer in self._ask(calls):
            try:
                self._checked(answer)
                shares[answer.site] = set(map(str, _field(answer, "share", list)))
                self._cases[answer.site] = _counts(_field(answer, "cases", dict))
                if "labelled" in answer.header:
                    labelled[answer.site] = [*map(str, _field(answer, "labelled", list))]
            except CollegiumError as error:
                failures.append(error)
        if failures:  # of every site, so that all can be mended before the next try
            failures.sort(key=str)
            raise type(failures[0])("; ".join(map(str, failures)))
        self._check_labelled(labelled)
        self._shares = shares
        for variation in self.variations:  # again, now that it is known who shares a model
            self.check_adapters(variation, None)

    def _check_labelled(self, labelled: Mapping[str, Sequence[str]]) -> None:
        """Refuse classes that no site of a fold annotates, given what sites with some only say."""
        for variation in self.variations.values():
            for fold in folds_of(variation):
                federation = fold.config.federation
                said = [labelled.get(site) for site in sites_of(federation)]
                if problem := never_labelled(federation.task.classes[1:], said):
                    raise ConfigError(problem)

    def shares(self, config: ExperimentConfig) -> bool:
        """Return whether a site that trains in a fold shares its personal model, as it said itself.

        See `OpenedExperiment.shares`.
        """
        if self._shares is None:
            return True
        inside = sites_of(config.federation)
        return any("personal" in self._shares.get(site, ()) for site in inside)

    def federation_to_survey(self) -> Federation:
        """Return the federation, of whose sites only the names are known."""
        federation, inside = self.variation(""), sites_of(self.config.federation)
        return replace(federation, sites={name: federation.sites[name] for name in inside})

    def survey_transport(self) -> Transport:
        """Return what carries the survey to the sites that train."""
        return _Requests(self, {"purpose": "survey"})

    def transport(self, job: Job) -> Transport:
        """Return what carries the requests of a job that trains to its sites."""
        return _Requests(self, {"job": job.key, **self._scaling(job)})

    def _scaling_transport(self, job: Job) -> Transport:
        return _Requests(self, {"job": job.key, "purpose": "scaling"})

    def _scaling(self, job: Job) -> dict[str, Any]:
        path = job.folder.parents[1] / FILE
        return {"scaling": read_sealed(path, ASK_AGAIN)} if path.exists() else {}

    def finish(
        self, job: Job, run: Run, scores: Mapping[str, Mapping[str, list[dict[str, Any]]]]
    ) -> None:
        """Have every site write its own rows and pictures; those that it lets out come back here.

        See `OpenedExperiment.finish`.
        """
        records = [asdict(record) for record in run.records()]
        holder = self.holder(job).key  # a site cannot know which of equal jobs has trained

        def call(site: str) -> Call:
            own = [_of_site(record, site) for record in records]
            about = {"job": job.key, "holder": holder, "records": own, "scores": scores[site]}
            model = run.global_model(site)
            data = pack({} if model is None else {"model": model})
            return Call(site, {**self._call(site, "finish").header, **about}, data)

        index: list[dict[str, Any]] = []
        for answer in self._ask_patiently(map(call, sorted(scores))):
            own, pictures = _pictures(answer)
            index += own
            for name, picture in pictures.items():
                write_atomically(job.folder / "overlays" / name, picture)
        if job.seed == job.config.seeds[0]:
            write_index(job.folder / "overlays", index)

    def conclude(self) -> None:
        """Have every site write its own tables and report, and store the estimates that it sends.

        Those of an earlier end of the run, which may have had fewer jobs, are removed first. Under
        the policy to skip, a site whose estimates are none goes without them.
        """
        output = Path(self.config.output)
        shutil.rmtree(output / sent_estimates.FOLDER, ignore_errors=True)
        calls = (self._call(site, "report") for site in sorted(self.config.federation.sites))
        for answer in self._ask_patiently(calls):
            try:
                if answer.data:
                    sent_estimates.store(_parts(answer).get("estimates"), answer.site, output)
            except ProtocolError as error:
                if self.config.participation.on_failure != "skip":
                    raise
                logger.warning("%s; its verdicts go without them", error)

    def adapt(self, job: Job, config: AdapterConfig, site: str, folder: Path) -> None:
        """Send a job's models to one site outside, which adapts them, and store what it sends.

        See `OpenedExperiment.adapt`.
        """
        models = outside.ModelFiles(self.holder(job).folder / DEPLOYED)
        data = pack({"models": {name: models[name] for name in models}, "server": models.server})
        about = {"job": job.key, "adapter": config.to_dict()}
        call = Call(site, {**self._call(site, "adapt").header, **about}, data)
        (answer,) = self._ask_patiently([call])
        account, scores = self._outcome(answer, job, config)
        shutil.rmtree(folder, ignore_errors=True)
        write_atomically(folder / ACCOUNT_FILE, seal_json(json.dumps(account)))
        write_atomically(folder / SCORES_FILE, seal_json(json.dumps(scores)))

    def _outcome(
        self, answer: Answer, job: Job, config: AdapterConfig
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return account and scores of an adaptation, checked."""
        known = {"adapter": config.to_dict(), "algorithm": job.algorithm.label, "seed": job.seed}
        scores, task = _field(answer, "scores", dict), task_of(job.config)
        try:
            known["site"] = answer.site
            account = checked_account(_field(answer, "account", dict), known)
            rows = scores.get("cases")
            if scores.keys() != {"seconds", "cases"} or not isinstance(rows, list):
                raise ProtocolError("its scores cannot be used")
            if len(rows) > account["cases"]:
                raise ProtocolError(f"it scored {len(rows)} of {account['cases']} cases")
            check_rows(rows, metrics_of(task), task.metric, account["cases"])
        except ProtocolError as error:
            raise ProtocolError(f"site {answer.site}: {error}") from error
        return account, {"seconds": account["seconds"], "cases": rows}

    def _ask_patiently(self, calls: Iterable[Call]) -> Iterator[Answer]:
        """Yield the answers to calls, and raise the first failure among them."""
        for answer in self._ask(calls):
            self._checked(answer)
            yield answer

    def _ask(self, calls: Iterable[Call]) -> Iterator[Answer]:
        """Yield the answers to calls; who gets lost or is missing is treated as in training."""
        participation, began = self.config.participation, time.monotonic()
        waiting = {call.site: call for call in calls}
        while waiting:
            again: dict[str, Call] = {}
            for answer in self._connection.ask(iter(waiting.values())):
                site, late = answer.site, time.monotonic() - began > participation.retry_seconds
                if answer.again or (
                    answer.missing and participation.on_failure == "retry" and not late
                ):
                    again[site] = waiting[site]
                elif answer.missing and participation.on_failure == "skip":
                    logger.warning("site %s: %s", site, answer.missing)
                else:
                    yield answer
            if again:
                time.sleep(RETRY_PAUSE)
            waiting = again

    def _call(self, site: str, do: str) -> Call:
        return Call(site, {"do": do, "site": site, "experiment": self._description})

    def _checked(self, answer: Answer) -> dict[str, Any]:
        """Return an answer's header, or raise the failure that it holds."""
        if answer.missing or answer.again:
            raise MissingReply(f"site {answer.site} {answer.missing or 'lost its connection'}")
        if "error" in answer.header:
            kind, sentence = kind_and_sentence(_field(answer, "error", dict))
            raise kind(f"site {answer.site}: {sentence}")
        return answer.header

    def note(self, event: Event) -> None:
        """Write where the run stands, for `collegium status`.

        Args:
            event: what happened.
        """
        about = {name: value for name, value in asdict(event).items() if value}
        data = {"experiment": self.config.name, "at": time.time(), **about}
        write_atomically(self._progress, json.dumps(data).encode())

    def close(self) -> None:
        """End the FLARE job and the session."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Requests:
    """A transport: the runtime's requests as calls of one job.

    Args:
        experiment: the experiment.
        about: what the sites are told of the job.
    """

    def __init__(self, experiment: RemoteExperiment, about: Mapping[str, Any]) -> None:
        self._experiment, self._about = experiment, dict(about)

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Deliver the requests, which are built as they are sent; yield responses as they come."""
        for answer in self._experiment._connection.ask(map(self._call, requests)):
            yield _response(answer)

    def _call(self, request: Request) -> Call:
        call = self._experiment._call(request.client, "handle")
        names = ("round", "exchange", "stage", "method", "floor", "accepted")
        call.header |= self._about | {"request": {name: getattr(request, name) for name in names}}
        call.payload = request.payload
        return call

    def close(self) -> None:
        """Nothing is held: the connection serves the whole experiment."""


def _identity_of(config: ExperimentConfig, kit: Kit, experiment: str) -> Identity | None:
    """Return by what the server checks signatures of the sites' keys, where they sign any."""
    if not masks_means(config):
        return None
    return read_identity(kit.certificate, kit.private_key, kit.authority, experiment, {})


def _response(answer: Answer) -> Response:
    """Return an answer as the runtime takes it, which checks the data; a header is checked here."""
    try:
        if "error" in answer.header:
            kind, sentence = kind_and_sentence(_field(answer, "error", dict))
            error = {"kind": kind.__name__, "text": sentence}
            return Response(answer.site, pack({"error": error}), 0.0)
        if answer.missing or answer.again:
            return Response(answer.site, b"", 0.0, answer.missing, answer.again)
        seconds = _field(answer, "seconds", float)
        if not 0 <= seconds <= LONGEST_WORK:
            raise ProtocolError("it does not say how long it worked")
        signed = answer.header.get("signed")
        if signed is None and answer.data != RESEND_REQUEST:
            raise ProtocolError("it does not say what its ledger holds")
        signed = None if signed is None else SignOff.parse(signed)
    except ProtocolError as error:
        told = {"kind": "ProtocolError", "text": str(error)}
        return Response(answer.site, pack({"error": told}), 0.0)
    return Response(answer.site, answer.data, seconds, signed=signed)


LONGEST_WORK = 1e9
"""Seconds that a site may say that it worked at most; beyond this it is no time."""

T = TypeVar("T")


def _field(answer: Answer, name: str, kind: type[T]) -> T:
    """Return a value of an answer's header, which a site may have made up."""
    value = answer.header.get(name)
    if not isinstance(value, kind):
        raise ProtocolError(f"site {answer.site}: its answer has no {name} that could be used")
    return value


def _counts(found: Mapping[str, Any]) -> dict[str, int]:
    """Return how many cases a site says that it has, by variation.

    Raises:
        ProtocolError: these are no counts.
    """
    for number in found.values():
        if type(number) is not int or not 0 <= number <= LARGEST_COUNT:
            raise ProtocolError("its answer does not say how many cases it has")
    return {str(name): number for name, number in found.items()}


def _parts(answer: Answer) -> dict[str, Any]:
    """Return the parts in an answer's data, by name."""
    try:
        found = unpack(answer.data) if answer.data else {}
    except ProtocolError as error:
        raise ProtocolError(f"site {answer.site}: {error}") from error
    if not isinstance(found, dict):
        raise ProtocolError(f"site {answer.site}: its answer holds no parts")
    return found


def _pictures(answer: Answer) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Return what a site says of its pictures, and the pictures by file name."""
    found = _parts(answer) if answer.data else {"index": []}
    try:
        return checked_pictures(found, answer.site)
    except ProtocolError as error:
        raise ProtocolError(f"site {answer.site}: {error}") from error


def _of_site(record: Mapping[str, Any], site: str) -> dict[str, Any]:
    """Return what the record of a round says of one site."""
    own: dict[str, Any] = {name: record[name] for name in ("round", "stopped")}
    own["left_out"] = []
    own["scores"] = {
        kind: {site: found[site]} for kind, found in record["scores"].items() if site in found
    }
    own["choices"] = {
        kind: {
            chooser: {**chosen, "score": chosen["score"] if chooser == site else None}
            for chooser, chosen in found.items()
            if chooser in (site, FEDERATION)
        }
        for kind, found in record["choices"].items()
    }
    for name in ("losses", "bytes_up", "bytes_down", "seconds", "numbers"):
        own[name] = {site: record[name][site]} if site in record[name] else {}
    return own
