"""What the server makes of answers that a site has made up."""

from types import SimpleNamespace

import pytest
import torch

from collegium.core.message import pack, unpack
from collegium.core.tensors import Tensors
from collegium.distributed.answers import checked_account
from collegium.distributed.connection import Answer
from collegium.distributed.experiment import RemoteExperiment, _pictures, _response
from collegium.distributed.kits import Provision, make_kits
from collegium.errors import ConfigError, DataError, MissingReply, ProtocolError
from collegium.experiment.config.experiment import parse_config
from collegium.runtime.ledger import SignOff


@pytest.mark.parametrize("seconds", ["x", None, [1.0], {}, "1e9", True, 3])
def test_seconds_that_are_no_time_are_an_error_of_the_site(seconds):
    response = _response(Answer("birch", {"seconds": seconds}, b"data"))
    error = unpack(response.data)["error"]
    assert error["kind"] == "ProtocolError"
    assert error["text"] == "site birch: its answer has no seconds that could be used"


@pytest.mark.parametrize(
    "signed",
    [
        None,
        3,
        {},
        {"lines": 0, "last": "1" * 64, "previous": "1" * 64, "sha256": "1" * 64},
        {"lines": True, "last": "1" * 64, "previous": "1" * 64, "sha256": "1" * 64},
        {"lines": 10**400, "last": "1" * 64, "previous": "1" * 64, "sha256": "1" * 64},
        {"lines": 1, "last": "1" * 63, "previous": "1" * 64, "sha256": "1" * 64},
        {"lines": 1, "last": "1" * 64, "previous": "1" * 64, "sha256": "1" * 64, "more": 1},
    ],
)
def test_a_reply_whose_ledger_is_not_signed_off_is_an_error_of_the_site(signed):
    response = _response(Answer("birch", {"seconds": 1.5, "signed": signed}, b"data"))
    assert unpack(response.data)["error"]["text"] == "it does not say what its ledger holds"


@pytest.mark.parametrize("error", [3, None, "text", []])
def test_an_error_that_is_none_is_an_error_of_the_site(error):
    response = _response(Answer("birch", {"error": error}))
    assert unpack(response.data)["error"]["kind"] == "ProtocolError"


def test_what_a_site_says_of_an_error_arrives_as_text():
    response = _response(Answer("birch", {"error": {"kind": "X", "text": {"a": None}}}))
    assert unpack(response.data) == {"error": {"kind": "ClientError", "text": "{'a': None}"}}
    response = _response(Answer("birch", {"error": {"code": "storage", "names": 3}}))
    assert unpack(response.data)["error"]["kind"] == "StorageError"
    response = _response(Answer("birch", {"error": {"text": "\x1b[2Jred\n" + "x" * 9999}}))
    said = unpack(response.data)["error"]["text"]
    assert (said[:8], len(said)) == ("\ufffd[2Jred ", 2000)


def test_an_answer_of_the_site_arrives_as_it_is():
    signed = SignOff(3, "1" * 64, "2" * 64, "3" * 64)
    response = _response(Answer("birch", {"seconds": 1.5, "signed": signed.to_dict()}, b"data"))
    assert (response.data, response.seconds, response.signed) == (b"data", 1.5, signed)
    assert _response(Answer("birch", {}, missing="is asleep")).missing == "is asleep"
    assert _response(Answer("birch", {}, again=True)).again


PNG = torch.tensor([1, 2, 3], dtype=torch.uint8)
FILE, LAYER = "birch-global-test-c001.png", "birch-global-test-c001-truth.webp"
ENTRY = {
    "site": "birch", "model": "global", "metric": "dice", "case": "test-c001", "rank": "best",
    "value": 0.5, "file": FILE, "layers": {"truth": LAYER},
}  # fmt: skip


def pictures(*entries, **files):
    return pack({"index": [*entries], "files": Tensors(files)})


def test_pictures_arrive_under_their_names():
    data = pictures(ENTRY, **{FILE: PNG, LAYER: PNG})
    expected = dict.fromkeys((FILE, LAYER), b"\x01\x02\x03")
    assert _pictures(Answer("birch", {}, data)) == ([ENTRY], expected)
    assert _pictures(Answer("birch", {})) == ([], {})


@pytest.mark.parametrize(
    "name",
    [
        "../a.png",
        "/tmp/a.png",
        "a/b.png",
        "index.json",
        "a.html",
        "",
        "birch.png",
        "alder-global-test-c001.png",
        "birch-elm-global-test-c001.png",
        "birch-global-Doe.png",
        "birch-global-test-c001.png\n",
    ],
)
def test_no_picture_is_written_elsewhere_or_in_the_place_of_another_sites(name):
    with pytest.raises(ProtocolError, match=r"site birch: .* cannot name one of its pictures"):
        _pictures(Answer("birch", {}, pictures(**{name: PNG})))


@pytest.mark.parametrize(
    "changes",
    [
        {"site": "alder"},
        {"file": "../../../etc/passwd"},
        {"file": "alder-global-test-c001.png"},
        {"layers": {"truth": "../secret.png"}},
        {"rank": "Doe"},
        {"case": "Doe"},
        {"model": "Doe"},
        {"value": float("nan")},
        {"patient": "Doe"},
    ],
)
def test_an_index_names_nothing_but_the_pictures_that_came(changes):
    data = pictures({**ENTRY, **changes}, **{FILE: PNG, LAYER: PNG})
    with pytest.raises(ProtocolError, match=r"site birch: its (index|answer)"):
        _pictures(Answer("birch", {}, data))


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"index": 3, "files": {}},
        {"files": {}},
        {"index": [], "files": {"a.png": 3}},
        {"index": [], "files": Tensors({FILE: torch.ones(3)})},
    ],
)
def test_what_are_no_pictures_is_an_error_of_the_site(content):
    with pytest.raises(ProtocolError, match="site birch: its answer holds no pictures"):
        _pictures(Answer("birch", {}, pack(content)))


KNOWN = {"adapter": {"name": "tent"}, "algorithm": "fedavg", "seed": 0, "site": "birch"}
ACCOUNT = {
    "cases": 3, "seconds": 1.5, "sources": ["global"], "steps": 4, "losses": [{"total": 0.5}],
    "chosen": None, "over": "step", "notes": ["a note"],
    "coefficients": {"layers": ["up", "down"], "sources": ["global"], "values": [[1.0], [1.0]]},
}  # fmt: skip


STEPS = {
    "metric": "dice", "unit": "", "steps": [0, 1], "mean": [0.5, None], "deviation": [0.1, None],
    "cases": [3, 0], "seconds": [1.0, 2.5],
}  # fmt: skip


def test_an_account_may_hold_what_happened_at_every_step():
    more = {"loss_deviations": [{"step": 0, "total": 0.25}], "by_step": STEPS}
    assert checked_account({**ACCOUNT, **more}, KNOWN) == {**ACCOUNT, **more, **KNOWN}


def test_an_account_is_taken_with_what_the_server_asked_for():
    assert checked_account({**ACCOUNT, "site": "alder", "seed": 9}, KNOWN) == {**ACCOUNT, **KNOWN}
    assert checked_account({"cases": 3, "seconds": 1.5}, KNOWN)["cases"] == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"cases": -1},
        {"cases": 10**400},
        {"cases": None},
        {"seconds": float("nan")},
        {"seconds": -1.0},
        {"steps": "4"},
        {"losses": [{"total": float("inf")}]},
        {"losses": [{"Doe, Jane": 0.5}]},
        {"over": "patient"},
        {"notes": [3]},
        {"notes": ["x"] * 1000},
        {"sources": ["Doe, Jane"]},
        {"patient": "Doe"},
        {"coefficients": {"layers": ["up"], "sources": ["global"], "values": [[1.0], [1.0]]}},
        {"coefficients": {"layers": ["up"], "sources": ["global"], "values": [[1.0, 2.0]]}},
        {"coefficients": {"layers": ["up"], "sources": [], "values": "Doe"}},
        {"loss_deviations": [{"total": float("nan")}]},
        {"loss_deviations": ["Doe"]},
        {"by_step": {**STEPS, "mean": [0.5]}},
        {"by_step": {**STEPS, "seconds": [-1.0, 2.0]}},
        {"by_step": {**STEPS, "deviation": [-0.1, None]}},
        {"by_step": {**STEPS, "patient": "Doe"}},
        {"by_step": {**STEPS, "metric": "Doe, Jane"}},
        {"by_step": {**STEPS, "unit": "x" * 99}},
    ],
)
def test_an_account_that_no_site_has_is_refused(changes):
    with pytest.raises(ProtocolError, match="its account of the adaptation cannot be used"):
        checked_account({**ACCOUNT, **changes}, KNOWN)


def test_a_note_is_shown_without_control_characters():
    found = checked_account({**ACCOUNT, "notes": ["\x1b[2J" + "x" * 9999]}, KNOWN)
    assert (found["notes"][0][:5], len(found["notes"][0])) == ("\ufffd[2Jx", 500)


def experiment(folder, sites=("alder", "birch"), **changes):
    return parse_config(
        {
            "name": "tiny",
            "federation": {"name": "two", "sites": {site: {"remote": True} for site in sites}},
            "model": {"name": "unet", "in_channels": 1, "channels": [4, 8], "num_res_units": 0},
            "algorithms": ["fedavg"],
            "rounds": 1,
            "engine": {"name": "flare", "folder": str(folder)},
            **changes,
        }
    )


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers") / "con"
    make_kits(folder, Provision(server="localhost", sites=("alder", "birch"), port=18191))
    return folder


def check(kits, answers, **changes):
    """Let an experiment check its sites, which answer as told."""
    remote = RemoteExperiment(experiment(kits, **changes))
    found = {answer.site: answer for answer in answers}
    remote._connection = SimpleNamespace(  # type: ignore[assignment]
        ask=lambda calls: iter([found[call.site] for call in calls]), close=lambda: None
    )
    remote.check()
    return remote


FINE = Answer("alder", {"share": ["personal"], "cases": {"": 10}})
ALONE = {"share": [], "cases": {"": 10}}


def test_sites_that_are_ready_say_what_they_share(kits):
    remote = check(kits, [FINE, Answer("birch", ALONE)])
    assert remote.shares(remote.config)
    remote = check(kits, [Answer("alder", ALONE), Answer("birch", ALONE)])
    assert not remote.shares(remote.config)


@pytest.mark.parametrize("sent", [{"estimates": 3}, {"estimates": [{}]}, {}])
def test_estimates_that_are_none_leave_out_their_site_under_skip(kits, tmp_path, caplog, sent):
    answers = {
        "alder": Answer("alder", {}, pack({"estimates": []})),
        "birch": Answer("birch", {}, pack(sent)),
    }

    def conclude(policy):
        remote = RemoteExperiment(
            experiment(kits, output=str(tmp_path), participation={"on_failure": policy})
        )
        remote._connection = SimpleNamespace(  # type: ignore[assignment]
            ask=lambda calls: iter([answers[call.site] for call in calls]), close=lambda: None
        )
        remote.conclude()

    with pytest.raises(ProtocolError, match=r"^site birch: "):
        conclude("fail")
    conclude("skip")
    assert [path.name for path in tmp_path.rglob("*.json")] == ["alder.json"]
    assert "site birch: " in caplog.text
    assert "its verdicts go without them" in caplog.text


def test_a_class_that_no_site_says_to_annotate_is_refused(kits):
    task = {"name": "segmentation", "classes": ["background", "a", "b", "c"]}
    federation = {"name": "two", "sites": {s: {"remote": True} for s in ("alder", "birch")}}

    def ask(alder, birch, **changes):
        said = {"alder": alder, "birch": birch}
        answers = [
            Answer(site, {**ALONE, **({} if names is None else {"labelled": names})})
            for site, names in said.items()
        ]
        check(kits, answers, federation={**federation, "task": task, **changes})

    ask(["a", "b"], ["c"])
    ask(["a"], None)
    with pytest.raises(ConfigError, match="no site that trains has labelled b, c: nothing can be"):
        ask(["a"], ["a"])
    with pytest.raises(ConfigError, match="no site that trains has labelled c: nothing can be"):
        ask(["a", "b"], ["c"], outside=["birch"])
    with pytest.raises(ProtocolError, match="site birch: its answer has no labelled that could be"):
        ask(["a"], "c")


def test_sites_whose_data_are_elsewhere_may_be_stopped_early(kits):
    check(kits, [FINE, Answer("birch", ALONE)], early_stopping={"patience": 1})


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"share": None},
        {"share": "personal"},
        {"share": [], "cases": 3},
        {"share": []},
        {"error": None},
    ],
)
def test_a_site_that_answers_nonsense_is_named(kits, header):
    with pytest.raises(ProtocolError, match=r"site birch: its answer has no (share|cases|error)"):
        check(kits, [FINE, Answer("birch", header)])


def test_a_failure_of_a_site_is_of_its_kind_and_names_the_site(kits):
    error = {"code": "data", "names": {}}
    with pytest.raises(DataError, match=r"^site birch: a file, .* there is unusable; the details"):
        check(kits, [FINE, Answer("birch", {"error": error})])


def test_a_site_that_is_missing_ends_the_run_or_is_left_out(kits):
    answers = [FINE, Answer("birch", {}, missing="is not connected")]
    with pytest.raises(MissingReply, match=r"^site birch is not connected$"):
        check(kits, answers)
    assert check(kits, answers, participation={"on_failure": "skip"})._shares == {
        "alder": {"personal"}
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine": {"name": "flare"}}, "engine.folder is missing"),
        ({"sites": ("alder", "dogwood")}, "there is no start-up kit for dogwood"),
    ],
)
def test_what_cannot_run_over_flare_is_refused_before_anybody_is_asked(kits, changes, said):
    with pytest.raises(ConfigError, match=said):
        RemoteExperiment(experiment(kits, **changes))
