"""The site process: it holds a hospital's data, network, state and policy, and answers the server.

It opens its own file, of which the server learns nothing. FLARE's processes reach it by a Unix
socket that only its owner may open, or a group that its file names.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from collegium.adaptation.outside import ModelFiles
from collegium.core.failures import FAILURE, kind_and_sentence, known_error
from collegium.core.files import write_atomically
from collegium.core.message import pack, unpack
from collegium.core.seals import START_AGAIN, read_sealed, seal_json
from collegium.core.settings import Positive, settings
from collegium.core.tensors import Tensors
from collegium.data.federation_config import SiteConfig
from collegium.diagnostics.assessment.survey import Assessment, clients_to_survey
from collegium.distributed.acceptance import Acceptance
from collegium.distributed.description import check_versions, digest
from collegium.distributed.frames import Line, TooLargeError, listen
from collegium.distributed.kits import Kit
from collegium.distributed.ledgers import LEDGER
from collegium.distributed.logs import fields
from collegium.errors import (
    CheckpointError,
    CollegiumError,
    ConfigError,
    ProtocolError,
    StorageError,
)
from collegium.evaluation.report.overlays import PICTURES, read_index, read_picture
from collegium.evaluation.results import ROWS_FILE, results_frame, write_rows
from collegium.evaluation.writing import run_estimates
from collegium.experiment.adaptations import write_adaptation
from collegium.experiment.config import schema
from collegium.experiment.config.building import adapters_of
from collegium.experiment.config.experiment import ExperimentConfig, parse_config
from collegium.experiment.config.yaml_file import read_yaml_file
from collegium.experiment.federation import OpenedExperiment
from collegium.experiment.grid import Job, masks_means, parts_of, variations_of
from collegium.experiment.job_results import (
    ACCOUNT_FILE,
    SCORES_FILE,
    job_rows,
    outside_rows,
    write_model_files,
)
from collegium.experiment.runner import collect_rows, is_tested, write_outcome, write_run_file
from collegium.experiment.scaling import FILE
from collegium.runtime import process
from collegium.runtime.client import ClientRuntime, case_scores_file
from collegium.runtime.ledger import Ledger
from collegium.runtime.records import RoundRecord
from collegium.runtime.requests import Request, respond
from collegium.runtime.secure.identity import Identity, read_identity
from collegium.runtime.selection import mean_row
from collegium.training.compilation import compiler_problem

logger = logging.getLogger(__name__)


@settings
class SiteSettings:
    """A site's own file.

    Attributes:
        name: the site's name, as in its start-up kit and in experiments.
        data: the site's files and what may leave, as under `federation.sites` of an experiment.
        root: the folder that paths in `data` are relative to.
        state: the folder of the site's state: trained models, ledger, key to the pseudonyms.
        device: where models are trained, as torch writes it.
        accept: "all" takes part in every experiment of the server; "listed" in those that the
            operator accepted with `collegium site accept`.
        release: what of single test cases may leave the site, beside counts and means: "scores",
            under pseudonyms, and "pictures".
        methods: algorithms, adapters, codecs and networks of installed packages other than
            Collegium that an experiment may name, written `package.module:name`.
        largest: the largest message that is taken, in MB.
        socket_folder: the folder of the socket by which the relay reaches the site process; by
            default the folder of state, which nobody but the owner may enter.
        socket_group: a group whose members may use the socket, for a relay that runs as another
            user; it needs a `socket_folder`, which the group may enter.
        identity: a folder with the site's certificate and key, ``client.crt`` and ``client.key``,
            and ``rootCA.pem``, by which keys are signed and checked where an experiment has
            `secure_mean`; by default those of the kit with which the site process is started.
        peers: by site the fingerprint of its certificate, as its operator has told it; any other
            certificate of such a site is refused under `secure_mean`, whoever has signed it.
    """

    name: str
    data: SiteConfig
    root: str = "."
    state: str = "state"
    device: str = "cpu"
    accept: Literal["all", "listed"] = "listed"
    release: tuple[Literal["scores", "pictures"], ...] = ()
    methods: tuple[str, ...] = ()
    largest: Positive = 4096.0
    socket_folder: str | None = None
    socket_group: str | None = None
    identity: str | None = None
    peers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for site, digits in self.peers.items():
            if not re.fullmatch(r"[0-9a-f]{64}", digits):
                raise ConfigError(
                    f"peers: the fingerprint of {site!r} is no SHA-256; write what 'collegium site "
                    f"fingerprint' prints there"
                )
        if self.socket_group is not None and self.socket_folder is None:
            raise ConfigError(
                f"socket_group {self.socket_group!r} may not enter the folder of state, where the "
                f"socket is: name another folder for it under socket_folder"
            )

    @property
    def socket(self) -> Path:
        """The socket on which the site process listens."""
        return Path(self.socket_folder or self.state) / "site.sock"


def read_site_settings(path: Path) -> SiteSettings:
    """Read a site's own file; relative paths in it start from its folder.

    Args:
        path: the YAML file.

    Raises:
        ConfigError: with one sentence for every problem found.
    """
    data, source = read_yaml_file(path)
    found = schema.parse(SiteSettings, data, (), source)
    source.raise_problems()
    assert found is not None
    base = path.resolve().parent
    root, state = (str(base / Path(place).expanduser()) for place in (found.root, found.state))
    sockets, identity = (
        place and str(base / Path(place).expanduser())
        for place in (found.socket_folder, found.identity)
    )
    return replace(found, root=root, state=state, socket_folder=sockets, identity=identity)


def check_name(settings: SiteSettings, kit: Kit) -> None:
    """Check that a site's own file and its start-up kit are of the same site.

    Args:
        settings: the site's own file.
        kit: the kit.

    Raises:
        ConfigError: they are not.
    """
    if settings.name != kit.name:
        raise ConfigError(
            f"the site's file is of {settings.name!r}, and the start-up kit {kit.folder} of "
            f"{kit.name!r}; correct name in the file, or take the site's own kit"
        )


def group_number(name: str | None) -> int | None:
    """Return the number of a group of this machine; None where none is named.

    Raises:
        ConfigError: there is no such group.
    """
    import grp

    try:
        return None if name is None else grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise ConfigError(
            f"socket_group: there is no group {name!r} on this machine; make it or correct the name"
        ) from error


class SiteProcess:
    """Answers the server's calls, one at a time.

    Args:
        settings: the site's own file.
    """

    def __init__(self, settings: SiteSettings) -> None:
        self.settings = settings
        self.acceptance = Acceptance(Path(settings.state))
        self._ledger = Ledger(Path(settings.state) / LEDGER)
        self._experiments: dict[str, SiteExperiment] = {}
        self._at_work = threading.Lock()

    def serve(self) -> None:
        """Answer until the process is ended; a relay that goes away costs only its own call.

        Raises:
            StorageError: it cannot listen on its socket.
        """
        server = self._listen()
        name = self.settings.name
        logger.info("site %s listens at %s", name, self.settings.socket, extra=fields(site=name))
        while True:
            sock, _ = server.accept()
            threading.Thread(target=self._serve_one, args=(Line(sock),), daemon=True).start()

    def _listen(self) -> socket.socket:
        """Return the listening socket, in a folder that others may enter only as a group."""
        state, path = Path(self.settings.state), self.settings.socket
        group = group_number(self.settings.socket_group)
        try:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            if group is not None and not path.parent.exists():
                path.parent.mkdir(mode=0o750, parents=True)
                os.chown(path.parent, -1, group)
            return listen(path, group)
        except OSError as error:
            raise StorageError(f"the site process cannot listen: {error}") from error

    def _serve_one(self, line: Line) -> None:
        try:
            header, data = line.receive(int(self.settings.largest * 1e6))
            answer, reply = self.answer(header, data)
            del data
            line.send(answer, reply)
        except ValueError as error:
            told: CollegiumError = ProtocolError()
            if isinstance(error, TooLargeError):
                told = known_error("too_large", size=str(error.size), limit=str(error.limit))
            failure = self._told(told, {})
            about = _about(failure)
            logger.warning("a message was refused: %s", error, extra=about)
            with suppress(OSError):
                line.send({"error": failure})
        except (OSError, EOFError) as error:
            kind = type(error).__name__
            logger.warning("a relay went away (%s)", kind, extra=fields(kind=kind))
        finally:
            line.close()

    def answer(self, header: Mapping[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        """Return the header and the bytes of the answer to a call; a failure is an answer too.

        Args:
            header: the call's.
            data: its payload.
        """
        if header.get("do") == "state":
            return {"idle": not self._at_work.locked(), "name": self.settings.name}, b""
        with self._at_work:
            start = time.monotonic()
            try:
                answer, reply = self._experiment(header).answer(header, data)
            except Exception as error:
                failure = self._told(error, header)
                unforeseen = not isinstance(error, CollegiumError)
                about = _about(failure)
                logger.warning("a call was refused: %s", error, exc_info=unforeseen, extra=about)
                return {"error": failure}, b""
            did = {"do": header["do"], "seconds": round(time.monotonic() - start, 3),
                   "bytes_down": len(data), "bytes_up": len(reply)}  # fmt: skip
            logger.info("answered %s", did, extra=fields(**did))
            return answer, reply

    def _told(self, error: Exception, header: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the server may see of a failure, recorded in the site's ledger."""
        failure, _, _ = self._ledger.append_failure(
            error,
            lambda told: json.dumps(told).encode(),
            withhold=FAILURE in self.settings.data.forbid,
            method=str(header.get("do")),
        )
        return failure

    def _experiment(self, header: Mapping[str, Any]) -> SiteExperiment:
        """Return the experiment of a call, opened once; see `SiteExperiment`.

        Raises:
            ConfigError: it is not accepted, or not the code that is installed here.
            ProtocolError: the call is for another site.
        """
        if header.get("site") != self.settings.name:
            raise ProtocolError(
                f"this is site {self.settings.name!r}, and the call is for {header.get('site')!r}"
            )
        description = header["experiment"]
        name = digest(description)
        if name not in self._experiments:
            if self.settings.accept != "all":
                self.acceptance.check(self.settings.name, name, description)
            check_versions(description, self.settings.methods)
            self._experiments = {name: SiteExperiment(self.settings, description)}
            logger.info("opened the experiment %s", name, extra=fields(experiment=name))
        return self._experiments[name]


class SiteExperiment:
    """One experiment as a site takes part in it.

    Args:
        own: the site's own file.
        description: what the server tells; see `collegium.distributed.description.describe`.

    Raises:
        ConfigError: the settings are not valid.
    """

    def __init__(self, own: SiteSettings, description: Mapping[str, Any]) -> None:
        self._survey: Mapping[str, Any] = description.get("survey", {})
        self._own, self._name = own, own.name
        config = _own_config(own, description["settings"])
        identity = _identity_of(own, digest(description)) if masks_means(config) else None
        self._opened = OpenedExperiment(config, own.name, identity)
        self._clients: dict[str, ClientRuntime] = {}
        self._ledger = Ledger(Path(config.output) / LEDGER)
        try:
            write_run_file(config, Path(config.output))
        except CheckpointError as error:
            raise known_error("other_settings", site=own.name, run=config.name) from error
        process.prepare(config.engine.threads)

    def answer(self, header: Mapping[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        """Return the header and the bytes of the answer to a call.

        Args:
            header: the call's: `do` says what is asked.
            data: its payload.

        Raises:
            CollegiumError: it cannot be done.
        """
        do = header.get("do")
        if do == "handle":  # the client keeps the ledger of its job
            request = Request(client=self._name, payload=data, **header["request"])
            response = respond(self._client(header), request)
            signed = response.signed and response.signed.to_dict()
            return {"seconds": response.seconds, "signed": signed}, response.data
        answer: dict[str, Any] = {}
        parts: dict[str, Any] = {}
        if do == "open":
            answer = self._open()
        elif do == "finish":
            parts = self._finish(header, data)
        elif do == "adapt":
            answer = self._adapt(header, data)
        elif do == "report":
            parts = self._report()
        else:
            raise ProtocolError(f"{do!r} is not among what a site does")
        packed = pack(parts) if parts else b""
        if answer or parts:
            sent = json.dumps(answer).encode() + packed
            self._ledger.append(answer | parts, sent, method=do, job=header.get("job"))
        return answer, packed

    def _open(self) -> dict[str, Any]:
        """Check the machine, the data, and what the policy lets out, in every variation."""
        compiled = any(job.config.training.compile == "on" for job in self._opened.jobs)
        device = self._opened.config.engine.device
        if compiled and (problem := compiler_problem(device)):
            logger.warning("this site cannot compile: %s", problem)
            raise known_error("cannot_compile", site=self._name)
        for variation in self._opened.variations:
            self._opened.check_data(variation)
        own = self._opened.config.federation.sites[self._name]
        known = {} if own.labelled is None else {"labelled": [*own.labelled]}
        return {"share": sorted(own.share), "cases": self._cases(), **known}

    def _cases(self) -> dict[str, int]:
        """Return how many cases the site has in each variation, above which it never counts."""
        opened = self._opened
        sites = {n: opened.variation(n, parts_of(c)[0]).sites for n, c in opened.variations.items()}
        return {n: found[self._name].cases for n, found in sites.items() if self._name in found}

    def _finish(self, header: Mapping[str, Any], data: bytes) -> dict[str, Any]:
        """Write the site's own rows and pictures; return the pictures that may leave."""
        job, holder = self._job(header["job"]), self._job(header["holder"])
        scores = {self._name: self._own_scores(holder, header["scores"])}
        selected = {self._name: unpack(data).get("model")}
        self._opened.finish_sites(job, holder, selected, scores)
        records = [RoundRecord(**record) for record in header["records"]]
        write_rows(job.folder / ROWS_FILE, results_frame(job_rows(job, records, scores)))
        pictures = job.folder / "overlays"
        if "pictures" not in self._own.release or not pictures.exists():
            return {}
        index, digests = read_index(pictures)
        files = {
            path.name: torch.frombuffer(bytearray(read_picture(path, digests)), dtype=torch.uint8)
            for path in sorted(pictures.iterdir())
            if path.suffix in PICTURES
        }
        return {"index": index, "files": Tensors(files)}

    def _survey_client(self) -> ClientRuntime:
        """Return the client that answers a survey, which the policy limits part by part."""
        survey, federation = Assessment(**self._survey), self._opened.variation("")
        return clients_to_survey(self._opened.config, survey, federation)[self._name]

    def _own_scores(self, holder: Job, sent: Any) -> Any:
        """Return the site's test scores by case, which may never have left it."""
        root = holder.folder / "clients" / self._name
        path = case_scores_file(root, "test")
        return read_sealed(path, START_AGAIN) if path.exists() else sent

    def _adapt(self, header: Mapping[str, Any], data: bytes) -> dict[str, Any]:
        """Adapt the models to this site's cases; return of record and scores what may leave."""
        job, sent = self._job(header["job"]), unpack(data)
        folder = job.folder / "outside" / self._name
        sites = set(sent["models"]) - set(sent["server"])
        write_model_files(folder / "models", sent["models"], sites)
        adapters = adapters_of(job.config, job.algorithm)
        adapter = next(a for a in adapters if a.to_dict() == header["adapter"])
        cases = self._name, self._opened.outside(job, self._name)
        federation = self._opened.variation(job.variation, job.part)
        models = ModelFiles(folder / "models")
        write_adaptation(federation, job, adapter, cases, models, folder / adapter.label)
        done = [a.label for a in adapters if (folder / a.label / SCORES_FILE).exists()]
        rows = [row for a in done for row in outside_rows(job, self._name, a, folder / a)]
        write_rows(job.folder / ROWS_FILE, results_frame(rows))
        account, scores = (
            read_sealed(folder / adapter.label / name, "resume the run")
            for name in (ACCOUNT_FILE, SCORES_FILE)
        )
        if "scores" in self._own.release:
            return {"account": account, "scores": scores}
        kept = ("adapter", "algorithm", "seed", "site", "cases", "seconds")
        scores["cases"] = mean_row(scores["cases"], federation.task.metric)
        return {"account": {name: account[name] for name in kept}, "scores": scores}

    def _report(self) -> dict[str, Any]:
        """Write the site's own tables and report; return the estimates for those of all sites.

        They are for verdicts where the scores that these need stay here.
        """
        config = self._opened.config
        rows = collect_rows(config)
        if rows.empty:
            return {}
        write_outcome(config)
        if "scores" in self._own.release or not is_tested(rows):
            return {}
        return {"estimates": run_estimates(Path(config.output))}

    def _job(self, key: Any) -> Job:
        variation, fold, label, seed = key
        return self._opened.job((str(variation), str(fold), str(label), int(seed)))

    def _client(self, header: Mapping[str, Any]) -> ClientRuntime:
        """Return the client of a job; that of the job before is dropped."""
        name = json.dumps([header.get(key) for key in ("job", "scaling", "purpose")])
        if name not in self._clients and header.get("purpose") == "survey":
            self._clients = {name: self._survey_client()}
        if name not in self._clients:
            job, scaling = self._job(header["job"]), header.get("scaling")
            if scaling is not None:  # what all sites agreed on; see `agree_on_scaling`
                write_atomically(job.folder.parents[1] / FILE, seal_json(json.dumps(scaling)))
            clients = (
                self._opened.scaling_clients(job)
                if header.get("purpose") == "scaling"
                else self._opened.clients(job)
            )
            self._clients = {name: clients[self._name]}
        return self._clients[name]


def _own_config(own: SiteSettings, told: Mapping[str, Any]) -> ExperimentConfig:
    """Return an experiment's settings with the site's own paths, policy and device."""
    federation = {**told["federation"], "root": own.root}
    data_of_site = {**schema.plain(own.data), "case_scores": "scores" in own.release}
    federation["sites"] = {**federation["sites"], own.name: data_of_site}
    data = {
        **told,
        "federation": federation,
        "engine": {"threads": told["engine"]["threads"], "device": own.device},
    }
    config = parse_config(data, where="the experiment of the server")
    for name, variation in variations_of(config).items():
        if _of_site(variation, own.name) != _of_site(config, own.name):
            raise known_error("own_settings", site=own.name, variation=name)
    return replace(config, output=str(Path(own.state) / "runs" / config.name))


def _identity_of(own: SiteSettings, experiment: str) -> Identity:
    """Return by what a site signs its keys in an experiment, and checks those of the others."""
    if own.identity is None:
        raise known_error("secure_unsigned", site=own.name)
    place = Path(own.identity)
    files = place / "client.crt", place / "client.key", place / "rootCA.pem"
    return read_identity(*files, experiment, own.peers)


def _of_site(config: ExperimentConfig, site: str) -> tuple[Any, ...]:
    """Return of settings what only a site's own file may say."""
    federation = config.federation
    return federation.sites.get(site), federation.root, config.engine


def _about(failure: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a line of the log about a failure, as the server learns of it."""
    kind, sentence = kind_and_sentence(failure)
    return fields(kind=kind.__name__, text=sentence)
