"""The client runtime: runs the client half of an algorithm at one site.

Owns the client's data, state, randomness, ledger and best model.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from collegium.compression.session.client_session import ClientSession, EncodedReply, LostReference
from collegium.compression.session.groups import (
    CODEC_KEY,
    NO_CODECS,
    RESEND_REQUEST,
    Codecs,
    leaving_parts,
    on_device,
)
from collegium.compression.session.layout import ModelLayout
from collegium.core.algorithm import Algorithm, State, private_fits_of
from collegium.core.dataset import Dataset
from collegium.core.failures import FAILURE, known_error, reported_error
from collegium.core.files import write_atomically
from collegium.core.message import HELD_KEY, Held, Message, NotHeldError, pack, unpack
from collegium.core.payloads import Expected, check_parts, may_leave
from collegium.core.seals import check_seal, seal_json, seal_tensors
from collegium.core.tensors import Tensors
from collegium.core.text import without_formula
from collegium.data.site import Site
from collegium.errors import (
    CollegiumError,
    ConfigError,
    ProtocolError,
    StorageError,
)
from collegium.runtime.ledger import Ledger, SignOff
from collegium.runtime.local_work import LocalWork
from collegium.runtime.requests import Request, handler_of, origin_of, state_name
from collegium.runtime.secure.config import SecureMean
from collegium.runtime.secure.identity import Identity
from collegium.runtime.secure.parts import MASKED, PARTS
from collegium.runtime.secure.site import SiteMasks
from collegium.runtime.selection import KEPT, KeptModels, mean_defined, mean_row, scores_of
from collegium.runtime.state import Store
from collegium.tasks import TRUE_CLASS, is_hidden, metrics_of
from collegium.training.loop import LocalTraining

logger = logging.getLogger(__name__)

KEY_FILE, KEY_BYTES = "privacy.key", 32
"""The file in a site's own folder with the secret from which its noise is drawn, and its length."""


def case_scores_file(root: Path, method: str) -> Path:
    """Return the file in which a site keeps scores of single cases that may not leave it.

    Args:
        root: the site's own folder for the run.
        method: the handler that scored, such as "test".
    """
    return root / f"scores-{method}.json"


def _newest_allowed(before: str, accepted: str | None) -> str:
    """Return the name before which the newest state counts.

    Args:
        before: the name of the state that a request leads to.
        accepted: see `Request.accepted`.
    """
    if accepted is None:
        return before
    return min(before, f"{accepted}~") if accepted else ""


def _about(request: Request) -> dict[str, Any]:
    """Return of a request what the ledger holds of each message."""
    names = ("round", "exchange", "stage", "method")
    return {name: getattr(request, name) for name in names}


class ClientRuntime(LocalWork):
    """A site that responds to requests.

    Handling is a pure function of the request and of the state committed before it: a request may
    arrive twice, and any client may be rebuilt between two requests.

    Args:
        site: the site's data and policy.
        algorithm: the algorithm whose client half runs.
        training: network, task and recipe; shared by the clients of one process.
        make_model: returns the initial model.
        seed: of the run.
        root: the site's own folder for this run.
        rounds: how many rounds the run has.
        pool: the training data of all sites, in a simulation.
        codecs: the codecs of training exchanges; the server must have the same.
        held: the frozen tensors of the initial model, which messages leave out, as this site draws
            them. Where the server's are others, it sends them once, and the site keeps them.
        secure: how what is averaged is masked; None: replies leave as they are.
        identity: by which its keys for that are signed; None: nobody signs.
    """

    def __init__(
        self,
        site: Site,
        algorithm: Algorithm,
        training: LocalTraining,
        *,
        make_model: Callable[[], Tensors],
        seed: int,
        root: Path,
        rounds: int = 1,
        pool: Dataset | None = None,
        codecs: Codecs = NO_CODECS,
        held: Held | None = None,
        secure: SecureMean | None = None,
        identity: Identity | None = None,
    ) -> None:
        owner = f"site {site.name!r}"
        super().__init__(training, site.train, seed=seed, rounds=rounds, owner=owner)
        self.id, self.site, self.algorithm, self.root = site.name, site, algorithm, root
        self.store = Store(root / "states")
        self.ledger = Ledger(root / "ledger.jsonl")
        self._kept = KeptModels(root / KEPT)
        self.private_fits = private_fits_of(type(algorithm))
        self.final_epochs = algorithm.final_epochs
        self._held, self._held_file = held, root / "held.safetensors"
        self.codec_state: State = {}
        self._codecs = codecs
        self._layout = ModelLayout(training.current(), training.parts.trainable) if codecs else None
        self._pool, self._make_model = pool, make_model
        self._expected = Expected(
            Tensors(training.module.state_dict()),  # for names, shapes and types: no copy
            training.parts,
            algorithm.hyperparameters(),
            metrics=metrics_of(training.task),
            headline=training.task.metric,
            cases=site.cases,
        )
        self._secure, self._identity = secure, identity
        self.signed: SignOff | None = None
        """What the ledger held when the last response left; None: that is not recorded."""

    @property
    def initial_model(self) -> Tensors:
        """The common initial model, with what the method adds at this site as initialised."""
        device = self.training.device
        return self._make_model().map(lambda tensor: tensor.to(device))

    @cached_property
    def noise_seed(self) -> int:
        """The seed of the noise of private training: the run's, or the site's own secret.

        The secret is drawn when it is first needed. It stays the same in a run, so that a round
        that is made again has the same noise: another draw would cost epsilon once more.

        Raises:
            StorageError: the file is damaged.
        """
        privacy = self.training.config.privacy
        if privacy is None or privacy.noise_seed == "run":
            return self.seed
        file = self.root / KEY_FILE
        if not file.exists():
            write_atomically(file, secrets.token_bytes(KEY_BYTES), private=True)
        key = file.read_bytes()
        if len(key) != KEY_BYTES:
            raise StorageError(
                f"{file} is damaged: it holds {len(key)} bytes of {KEY_BYTES}; start the run again "
                f"in a new output folder"
            )
        return int.from_bytes(key)

    @property
    def validation_examples(self) -> Dataset:
        """The site's validation examples."""
        return self.site.val

    @property
    def pool(self) -> Dataset:
        """The training data of all sites together, in a simulation."""
        if self._pool is None:
            raise ConfigError(
                "pooled training needs the data of all sites in one place, which only a "
                "simulation has"
            )
        return self._pool

    def handle(self, request: Request) -> bytes:
        """Return the packed envelope that responds to ``request``: a reply or an error."""
        self.signed = None
        try:
            reply, sent = self._run(request)
            coded = {"coded": sent.coded} if sent.coded else {}
            data = pack({"reply": sent.parts, "of": origin_of(request), **coded}, self._held)
            parts = leaving_parts(reply, self._held)
            about = _about(request) | self._spent(reply)
            self.signed = self.ledger.append(parts, data, coded=sent.ledger, **about)
            return data
        except LostReference as error:
            logger.warning("site %r, round %d: %s", self.id, request.round, error)
            return RESEND_REQUEST
        except NotHeldError as error:  # as it is once where the server began with other weights
            logger.info("site %r, round %d: %s", self.id, request.round, error)
            return RESEND_REQUEST
        except Exception as error:
            reported = reported_error(error)
            unforeseen = not isinstance(reported, CollegiumError)
            logger.warning(
                "site %r, round %d, %s: %s",
                self.id,
                request.round,
                request.method,
                reported,
                exc_info=unforeseen or logger.isEnabledFor(logging.DEBUG),
            )
            return self._told(request, error)

    def _spent(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the ledger holds of the privacy of a reply: what all so far have cost."""
        privacy = self.training.config.privacy
        if privacy is None or "epsilon" not in reply.get("progress", {}):
            return {}
        spent = reply["progress"]["epsilon"]
        return {"privacy": {"unit": privacy.unit, "epsilon": spent, "delta": privacy.delta}}

    def _told(self, request: Request, error: Exception) -> bytes:
        """Return the envelope with what the server may see of a failure, recorded like any part."""
        _, data, self.signed = self.ledger.append_failure(
            error,
            lambda failure: pack({"error": failure}),
            withhold=FAILURE in self.site.policy.forbid,
            **_about(request),
        )
        return data

    def _run(self, request: Request) -> tuple[dict[str, Any], EncodedReply]:
        """Run the handler; return its reply, and the coded form in which it leaves."""
        if request.method == MASKED:
            return self._masked(request)
        method = handler_of(self.algorithm, request.method)
        before = f"{request.round:06d}-~"
        if request.stage == "train":
            before = state_name(request.round, request.exchange)
            self._drop_unaccepted(before, request.accepted)
        old = self._load(_newest_allowed(before, request.accepted))
        self.round = request.round
        self.begin_work("client", self.id, request.round, request.stage, request.exchange)
        parts = self._opened(request.payload)
        session = self._session(request)
        reply = dict(method(self, self._message(request, parts, session)))
        if self.progress:
            reply["progress"] = self._progress_to_send()
        if "scores" in reply and not self.site.policy.case_scores:
            reply["scores"] = self._withhold_cases(request.method, reply["scores"])
        self._check_egress(reply)
        if request.stage == "train" and (masks := self._masks()) is not None:
            reply = masks.withhold(reply, request.round, request.exchange)
        sent = EncodedReply(reply, {}, {}) if session is None else session.encode_reply(reply)
        if request.stage == "train":
            self._commit(before, old)
            self.store.prune(f"{request.floor:06d}")
        return reply, sent

    def _progress_to_send(self) -> dict[str, float]:
        """Return what the site says of its training; with privacy no loss, but what it has cost."""
        main = self.progress.get("fit") or next(iter(self.progress.values()))
        steps = sum(p.steps for p in self.progress.values())
        privacy = self.training.config.privacy
        if privacy is None or privacy.is_plain:
            return {"loss": main.loss, "steps": steps}
        spent = self.epsilon
        return {"steps": steps} if spent is None else {"steps": steps, "epsilon": spent}

    def _masks(self) -> SiteMasks | None:
        """Return what hides from the server what it averages; None: nothing is hidden."""
        if self._secure is None:
            return None
        sends, averaged = self.algorithm.all_sends(), self.algorithm.averaged_parts()
        expected, held = self._expected, self._held
        return SiteMasks(
            self._secure, self.id, self.root, sends, averaged, expected, held, self._identity
        )

    def _masked(self, request: Request) -> tuple[dict[str, Any], EncodedReply]:
        """Return what is averaged of the last reply, under masks; nothing else changes.

        Raises:
            ProtocolError: nothing is masked in this run.
        """
        masks = self._masks()
        if masks is None:
            raise ProtocolError("the server asks for a masked reply, and secure_mean is not set")
        asked = self._opened(request.payload)
        reply, about = masks.masked(asked, request.round, request.exchange)
        check_parts(type(self.algorithm).__name__, PARTS, reply, self._expected)
        return reply, EncodedReply(reply, {}, about)

    def _drop_unaccepted(self, before: str, accepted: str | None) -> None:
        """Remove states before a name whose replies the server has never used."""
        limit = _newest_allowed(before, accepted)
        for name in self.store.names():
            if limit <= name < before:
                self.store.remove(name)

    def _load(self, before: str) -> bytes:
        """Restore the newest state before a name, and return it as stored.

        A damaged one is refused: the state before it belongs to a round that the server has
        finished, and the server's models and averages already hold what the damaged one led to. (A
        state whose round the server has not finished is never read: the round is made again, and
        the state with it.)
        """
        self.store.clean()
        self._kept.clean()
        name = self.store.newest(before)
        data = self.store.read(name) if name else seal_tensors(pack({}))[0]
        self.state = self.store.decode(name, data, self.training.device) if name else {}
        self.codec_state = self.state.pop(CODEC_KEY, {})
        return data

    def _session(self, request: Request) -> ClientSession | None:
        """Return the codecs of the exchange; None if nothing is coded."""
        if self._layout is None or request.stage != "train":
            return None
        position = (self.id, request.round, request.exchange)
        return ClientSession(
            self._codecs,
            self._layout,
            self.codec_state,
            seed=self.seed,
            position=position,
            held=self._held,
        )

    def _opened(self, payload: bytes) -> dict[str, Any]:
        """Return the unpacked parts of a request, with what it leaves out.

        Raises:
            NotHeldError: it leaves out what this site neither draws nor has received.
        """
        try:
            parts: dict[str, Any] = unpack(payload, held=self._held)
        except NotHeldError:
            if not self._held_file.exists():
                raise
            self._held = self._stored_tensors()
            parts = unpack(payload, held=self._held)
        if HELD_KEY in parts:
            tensors = parts.pop(HELD_KEY)
            write_atomically(self._held_file, *seal_tensors(pack(tensors)))
            self._held = Held(tensors)
        return parts

    def _stored_tensors(self) -> Held:
        """Return the tensors that the server once sent, since messages leave them out.

        Raises:
            NotHeldError: the file is damaged, so that the server has to send them again.
        """
        data = self._held_file.read_bytes()
        try:
            check_seal(data)
            return Held(unpack(data))
        except (ValueError, ProtocolError) as error:
            raise NotHeldError("held.safetensors is damaged; the server sends it again") from error

    def _message(
        self, request: Request, parts: dict[str, Any], session: ClientSession | None
    ) -> Message:
        """Return a request's parts, decoded, on the device where the client computes."""
        decoded = parts if session is None else session.decode_request(parts)
        return Message(on_device(decoded, self.training.device), f"request {request.method!r}")

    def whole_state(self) -> State:
        """Return the state to store: the algorithm's and that of the codecs."""
        return self.state | ({CODEC_KEY: self.codec_state} if self.codec_state else {})

    def _commit(self, name: str, old: bytes) -> None:
        """Store the state under ``name`` if it changed; otherwise remove an older one."""
        seal, rest = seal_tensors(pack(self.whole_state()))
        if not old.startswith(seal):
            self.store.write(name, seal, rest)
        else:
            self.store.remove(name)

    def _withhold_cases(
        self, method: str, scores: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> dict[str, list[dict[str, Any]]]:
        """Keep the scores of single cases in the site's own folder; return their means."""
        write_atomically(case_scores_file(self.root, method), seal_json(json.dumps(scores)))
        metric = self.training.task.metric
        return {kind: mean_row(rows, metric) for kind, rows in scores.items()}

    def _check_egress(self, reply: Mapping[str, Any]) -> None:
        """Check a reply before it leaves: against the policy, and as the server will."""
        sends = self.algorithm.all_sends()
        for name in reply:
            if name in sends and not self.may_send(name):
                raise known_error("egress_part", site=self.id, part=name)
        check_parts(type(self.algorithm).__name__, sends, reply, self._expected)

    def may_send(self, part: str) -> bool:
        """Return whether the algorithm sends a part and the site's policy lets it out."""
        schema = self.algorithm.all_sends().get(part)
        policy = self.site.policy
        return schema is not None and may_leave(
            part,
            opt_in=schema.opt_in,
            allow=policy.allow,
            forbid=policy.forbid,
            share=policy.share,
        )

    def score(self, model: Tensors, split: str, *, headline: bool = False) -> list[dict[str, Any]]:
        """Return the scores of ``model`` on every case of a split, under pseudonyms.

        The key to the pseudonyms is written to ``cases-SPLIT.csv`` in the site's own folder and
        never leaves it.

        Args:
            model: a whole model.
            split: "train", "val" or "test".
            headline: only the metric that selects models, and the classes of the cases.
        """
        task = self.training.task
        rows = self._case_rows(model, split, (task.metric,) if headline else None)
        if not headline:
            chooses = split == "test" and task.needs_validation
            return task.add_set_scores(rows, self._case_rows(model, "val", ()) if chooses else ())
        return [
            {key: value for key, value in row.items() if key == TRUE_CLASS or not is_hidden(key)}
            for row in task.add_set_scores(rows)
        ]

    def _case_rows(
        self, model: Tensors, split: str, metrics: Sequence[str] | None
    ) -> list[dict[str, Any]]:
        """Return the scores of single cases under pseudonyms, and write the key to these."""
        dataset: Dataset = getattr(self.site, split)
        rows, key = [], []
        patients: dict[str, str] = {}
        for index, example, prediction in self.training.predictions(model, dataset):
            patient = patients.setdefault(example.patient, f"{split}-p{len(patients) + 1:03d}")
            case = f"{split}-c{index + 1:03d}"
            scores = self.training.task.scores(prediction, example, metrics)
            rows.append({"case": case, "patient": patient, **scores})
            key.append((case, patient, example.case, example.patient))
        self._write_key(split, key)
        return rows

    def _write_key(self, split: str, key: Sequence[tuple[str, str, str, str]]) -> None:
        path = self.root / f"cases-{split}.csv"
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(("case", "patient", "own_case", "own_patient"))
        writer.writerows(map(without_formula, row) for row in key)
        data = text.getvalue().encode()
        if not path.exists() or path.read_bytes() != data:
            write_atomically(path, data, private=True)

    def validate(self, model: Tensors) -> float | None:
        """Return the mean score of ``model`` on the validation cases; None if it is undefined.

        See `collegium.core.algorithm.Client.validate`.
        """
        rows = self.score(model, "val", headline=True)
        return mean_defined(scores_of(rows, self.training.task.metric))

    def keep(self, personal: Tensors | None, chosen: int | None) -> None:
        """Keep a personal model, and of those kept before only the chosen one.

        See `collegium.core.algorithm.Client.keep`.
        """
        self._kept.drop_all_but([] if chosen is None else [chosen])
        if personal is not None:
            self._kept.keep(personal, self.round)

    def kept(self) -> Tensors | None:
        """Return the newest personal model that is kept; None without one."""
        model = self._kept.load()
        return model and model.map(lambda tensor: tensor.to(self.training.device))
