"""The site process: what it answers, what it refuses, and what its failures tell."""

import json
import shutil
import socket
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from collegium.core.failures import kind_and_sentence
from collegium.core.message import pack, unpack
from collegium.data.phantoms import make_federation
from collegium.distributed.description import describe, digest
from collegium.distributed.experiment import _of_site
from collegium.distributed.frames import SIZES, Line
from collegium.distributed.kits import Kit, Provision, fingerprint, make_kits, read_kit
from collegium.distributed.site import SiteProcess, check_name, read_site_settings
from collegium.errors import ConfigError, ProtocolError
from collegium.experiment.config.building import network_of
from collegium.experiment.config.experiment import parse_config
from collegium.runtime.federation import initial_model
from collegium.runtime.ledger import read_ledger
from collegium.runtime.records import RoundRecord
from collegium.runtime.secure.identity import read_identity
from collegium.runtime.secure.parts import KEY
from collegium.runtime.selection import Chosen

MARKER = "zanzibar"
REQUEST = {"round": 1, "exchange": 0, "stage": "train", "method": "train", "floor": 0}
JOB = ["", "", "fedavg", 0]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / MARKER
    make_federation(folder, 2, cases=10, size=32)
    return folder


def experiment(**changes):
    data = {
        "name": "tiny",
        "federation": {
            "name": "phantoms",
            "sites": {"alder": {"remote": True}, "birch": {"remote": True}},
            "task": {"classes": ["background", "gland"], "label_map": {0: 0, 255: 1}},
            "image": {"channels": "grey", "normalise": "zscore"},
            "splits": {"validation": 0.2, "test": 0.4},
        },
        "model": {"name": "unet", "in_channels": 1, "channels": [4, 8], "num_res_units": 0},
        "training": {"batch_size": 2, "local_steps": 1},
        "algorithms": ["fedavg"],
        "rounds": 2,
        **changes,
    }
    return parse_config(data)


@pytest.fixture(scope="module")
def told():
    return describe(experiment())


@pytest.fixture(scope="module")
def model():
    return pack({"model": initial_model(network_of(experiment()), 0)})


@pytest.fixture
def own(tmp_path, images):
    """The settings of a site that takes part in everything."""
    about = {"name": "alder", "root": str(images), "data": {"manifest": "alder/manifest.csv"}}
    (tmp_path / "alder.yaml").write_text(yaml.safe_dump({**about, "accept": "all"}))
    return read_site_settings(tmp_path / "alder.yaml")


@pytest.fixture
def process(own):
    return SiteProcess(own)


def call(told, do="handle", **changes):
    return {"do": do, "site": "alder", "experiment": told, "job": JOB, "request": REQUEST} | changes


def refusal(process, header, data=b""):
    """What a site says that it refuses; nothing else leaves with it."""
    answer, sent = process.answer(header, data)
    assert (list(answer), sent) == (["error"], b"")
    return told_of(answer["error"])


def told_of(failure):
    """What the server makes of a failure: its kind and its sentence, and no other text comes."""
    assert failure.keys() == {"code", "names"}
    kind, sentence = kind_and_sentence(failure)
    return kind.__name__, sentence


def check_answers(process, told, model):
    """Check that a site does what it is asked, whatever was before."""
    assert process.answer({"do": "state"}, b"") == ({"idle": True, "name": "alder"}, b"")
    assert process.answer(call(told, "open"), b"") == ({"share": [], "cases": {"": 10}}, b"")
    header, data = process.answer(call(told), model)
    reply = unpack(data)["reply"]
    assert list(header) == ["seconds", "signed"]
    assert reply["num_examples"] == 4  # of ten images a fifth validates, and two fifths test
    assert reply["progress"]["steps"] == 1


def test_a_site_opens_trains_and_keeps_what_it_trained(process, told, model):
    check_answers(process, told, model)
    run = Path(process.settings.state) / "runs" / "tiny"
    assert (run / "fedavg" / "seed-0" / "clients" / "alder" / "ledger.jsonl").exists()
    assert (run / "splits" / "alder.json").exists()


def test_a_site_without_a_compiler_says_so_before_anything_is_trained(process):
    from torch._inductor import config

    told = describe(experiment(training={"batch_size": 2, "local_steps": 1, "compile": "on"}))
    with config.patch({"cpp.cxx": ("/there/is/none",)}):
        kind, text = refusal(process, call(told, "open"))
    assert kind == "ConfigError"
    assert text.startswith("training.compile is on, and site 'alder' cannot compile; have a")


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    names = ("alder", "birch", "cedar")
    return make_kits(tmp_path_factory.mktemp("kits"), Provision("localhost", names))


def startup(kits, name="alder"):
    """The settings with which `site start --kit` begins."""
    return {"identity": str(kits[name] / "startup")}


def test_a_site_that_cannot_sign_its_keys_says_so_before_anything_is_trained(own, kits):
    told = describe(experiment(variations={"masked": {"secure_mean": {}}}))
    kind, text = refusal(SiteProcess(own), call(told, "open"))
    assert kind == "ConfigError"
    assert text.startswith("site 'alder' has no certificate to sign its keys for secure_mean with;")
    answer, _ = SiteProcess(replace(own, **startup(kits))).answer(call(told, "open"), b"")
    assert answer["cases"] == {"masked": 10}


def test_a_key_leaves_with_the_signature_of_the_kit_for_this_experiment(own, kits, model):
    told = describe(experiment(secure_mean={}))
    _, data = SiteProcess(replace(own, **startup(kits))).answer(call(told), model)
    key = unpack(data)["reply"][KEY]
    birch = read_kit(kits["birch"], "site")
    files = birch.certificate, birch.private_key, birch.authority
    read_identity(*files, digest(told), {}).check("alder", 1, 0, key["key"], key)
    for experiment_, site in ((digest(told)[::-1], "alder"), (digest(told), "birch")):
        with pytest.raises(ProtocolError):
            read_identity(*files, experiment_, {}).check(site, 1, 0, key["key"], key)


def test_fingerprints_of_other_sites_stand_in_the_file_of_a_site(tmp_path, own, kits):
    about = yaml.safe_load((tmp_path / "alder.yaml").read_text())
    digits = fingerprint(read_kit(kits["birch"], "site"))
    about |= {"identity": "keys", "peers": {"birch": digits}}
    (tmp_path / "alder.yaml").write_text(yaml.safe_dump(about))
    found = read_site_settings(tmp_path / "alder.yaml")
    assert (found.identity, found.peers) == (str(tmp_path / "keys"), {"birch": digits})
    about["peers"]["birch"] = digits.upper()
    (tmp_path / "alder.yaml").write_text(yaml.safe_dump(about))
    with pytest.raises(ConfigError, match="the fingerprint of 'birch' is no SHA-256; write what"):
        read_site_settings(tmp_path / "alder.yaml")


def test_the_same_request_has_the_same_bits_again(process, told, model):
    _, first = process.answer(call(told), model)
    _, second = process.answer(call(told), model)
    assert first == second != b""


def test_rows_of_a_shared_training_are_read_where_the_server_says_it_trained(process, model):
    """The second of two equal variations trained; a site alone would look into the first."""
    lr = {"training.lr": 0.01}
    told = describe(experiment(variations={"early": lr, "late": lr}))
    early, late = (["early", "", "fedavg", 0], ["late", "", "fedavg", 0])
    process.answer(call(told, job=late), model)
    asked = {**REQUEST, "round": 2, "stage": "evaluate", "method": "test"}
    parts = {"models": {"1": unpack(model)["model"]}, "kinds": {"global": "1"}, "chosen": None}
    header, sent = process.answer(call(told, job=late, request=asked), pack(parts))
    assert "error" not in header
    scores = unpack(sent)["reply"]["scores"]
    chosen = {"round": 1, "score": 0.5, "events": 2}
    record = {"round": 1, "choices": {"global": {"alder": chosen, "": chosen}}}
    about = {"holder": late, "records": [record], "scores": scores}
    answer, _ = process.answer(call(told, "finish", job=early, **about), model)
    assert answer == {}
    run = Path(process.settings.state) / "runs" / "tiny"
    lines = (run / "early" / "fedavg" / "seed-0" / "rows.jsonl").read_text().splitlines()[:-1]
    cases = {row["case"] for row in map(json.loads, lines) if row["metric"] == "dice"}
    assert len(cases) == 3  # each of its test cases, not their mean


def test_a_site_writes_after_how_many_rounds_the_server_stopped_a_training(process, model):
    told = describe(experiment(rounds=9, home_rounds=2, early_stopping={"patience": 1}))
    chosen = Chosen(round=1, score=0.5, events=2)
    choices = {"global": {"alder": chosen, "": chosen}}
    records = [
        RoundRecord(1),
        RoundRecord(2, choices=choices, stopped=True),
    ]
    own = [_of_site(asdict(record), "alder") for record in records]
    scores = {"global": [{"case": "test-c001", "patient": "test-p001", "dice": 0.5}]}
    about = {"holder": JOB, "records": own, "scores": scores}
    answer, _ = process.answer(call(told, "finish", **about), model)
    assert answer == {}
    run = Path(process.settings.state) / "runs" / "tiny"
    rows = map(json.loads, (run / "fedavg/seed-0/rows.jsonl").read_text().splitlines()[:-1])
    found = [(row["site"], row["value"]) for row in rows if row["metric"] == "rounds"]
    assert found == [("alder", 4.0)]


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"site": "birch"}, "ProtocolError", "a message was not as the protocol demands"),
        ({"site": None}, "ProtocolError", "a message was not as the protocol demands"),
        ({"do": "remove"}, "ProtocolError", "a message was not as the protocol demands"),
        ({"do": None}, "ProtocolError", "a message was not as the protocol demands"),
        ({"do": "_open"}, "ProtocolError", "a message was not as the protocol demands"),
        ({"experiment": None}, "ClientError", "the details are in the log of this site"),
        ({"experiment": {}}, "ClientError", "the details are in the log of this site"),
        ({"experiment": [1]}, "ClientError", "the details are in the log of this site"),
        ({"job": None}, "ClientError", "the details are in the log of this site"),
        ({"job": ["", "", "../x", 0]}, "ClientError", "the details are in the log of this site"),
        ({"job": ["", "", "fedavg", 7]}, "ClientError", "the details are in the log of this site"),
        ({"request": {}}, "ClientError", "the details are in the log of this site"),
        ({"request": "x"}, "ClientError", "the details are in the log of this site"),
        ({"request": {**REQUEST, "client": "birch"}}, "ClientError", "the details are in the log"),
    ],
)
def test_a_call_that_is_none_is_refused_and_the_next_is_answered(
    process, told, model, changes, kind, text
):
    found, said = refusal(process, call(told, **changes), model)
    assert found == kind
    assert text in said
    check_answers(process, told, model)


@pytest.mark.parametrize("method", ["fit", "round", "__init__", "hyperparameters", "no", "", None])
def test_what_is_no_handler_is_not_called(process, told, model, method):
    answer, sent = process.answer(call(told, request={**REQUEST, "method": method}), model)
    assert list(answer) == ["seconds", "signed"]
    kind, _ = told_of(unpack(sent)["error"])
    assert kind in ({"ClientError"} if method is None else {"ProtocolError"})
    check_answers(process, told, model)


@pytest.mark.parametrize("data", [b"", b"garbage" * 10, bytes(100), pack({}), pack({"model": 3})])
def test_a_payload_that_is_no_message_is_an_answer(process, told, model, data):
    _, sent = process.answer(call(told), data)
    assert told_of(unpack(sent)["error"])[0] in {"ClientError", "ProtocolError"}
    assert MARKER.encode() not in sent
    check_answers(process, told, model)


def test_a_payload_that_is_cut_is_an_answer(process, told, model):
    for size in (1, 8, len(model) // 2, len(model) - 1):
        _, sent = process.answer(call(told), model[:size])
        assert told_of(unpack(sent)["error"])[0] in {"ClientError", "ProtocolError"}
    check_answers(process, told, model)


def test_an_experiment_is_refused_until_its_operator_accepts_it(own, told, model):
    process = SiteProcess(replace(own, accept="listed"))
    for do in ("open", "handle", "finish", "adapt", "report"):
        kind, text = refusal(process, call(told, do), model)
        assert kind == "ConfigError"
        assert f"has not accepted the experiment {digest(told)}" in text
    assert not (Path(own.state) / "runs").exists()
    process.acceptance.accept(digest(told)[:8])
    check_answers(process, told, model)
    other = describe(experiment(rounds=3))
    assert digest(other) in refusal(process, call(other, "open"))[1]


def test_a_site_whose_operator_listed_nothing_asks_for_acceptance_by_default(own, tmp_path):
    about = yaml.safe_load((tmp_path / "alder.yaml").read_text())
    del about["accept"]
    (tmp_path / "alder.yaml").write_text(yaml.safe_dump(about))
    assert read_site_settings(tmp_path / "alder.yaml").accept == "listed"


@pytest.mark.parametrize("name", ["../x", "..", "/tmp/x", "a/b", ".", "", "a\n", "~"])
def test_no_name_leads_out_of_the_state(process, told, model, tmp_path, name):
    before = {path for path in tmp_path.rglob("*") if "state" not in path.parts}
    settings = {**told["settings"], "name": name}
    kind, _ = refusal(process, call({**told, "settings": settings}, "open"), model)
    assert kind == "ConfigError"
    label = {**told["settings"], "algorithms": [{"name": "fedavg", "label": name or "."}]}
    assert refusal(process, call({**told, "settings": label}, "open"))[0] == "ConfigError"
    variations = {**told["settings"], "variations": {name: {"rounds": 1}}}
    assert refusal(process, call({**told, "settings": variations}, "open"))[0] == "ConfigError"
    assert {path for path in tmp_path.rglob("*") if "state" not in path.parts} == before
    assert not list(Path(process.settings.state).glob("*x*"))
    check_answers(process, told, model)


def test_another_version_is_refused_by_a_site(process, told, model):
    kind, text = refusal(process, call({**told, "collegium": "0.0.1"}, "open"))
    assert kind == "ConfigError"
    assert "the server runs Collegium 0.0.1" in text
    check_answers(process, told, model)


@pytest.mark.parametrize(
    "changes",
    [
        {"federation.root": "/etc"},
        {"federation.sites.alder.manifest": "birch/manifest.csv"},
        {"federation.sites.alder": {"manifest": "alder/manifest.csv", "share": ["personal"]}},
        {"federation.sites.alder.allow": ["model"]},
        {"federation.sites.alder.case_scores": True},
        {"engine.device": "meta"},
    ],
)
def test_no_variation_changes_what_the_sites_own_file_says(process, told, model, changes):
    settings = {**told["settings"], "variations": {"two": changes}}
    kind, text = refusal(process, call({**told, "settings": settings}, "open"))
    assert kind == "ConfigError"
    assert text.startswith(("the variation 'two' changes what the file of", "a setting cannot"))
    check_answers(process, told, model)


def test_a_site_says_which_classes_it_annotates_if_these_are_not_all(own, told):
    process = SiteProcess(replace(own, data=replace(own.data, labelled=("gland",))))
    settings = json.loads(json.dumps(told["settings"]))
    settings["federation"]["task"]["classes"].append("spleen")
    answer = process.answer(call({**told, "settings": settings}, "open"), b"")
    assert answer == ({"share": [], "cases": {"": 10}, "labelled": ["gland"]}, b"")


def test_the_servers_word_on_paths_policy_and_device_is_ignored(own, told, model):
    process = SiteProcess(replace(own, data=replace(own.data, forbid=("num_examples",))))
    settings = json.loads(json.dumps(told["settings"]))
    settings["federation"] |= {"root": "/etc"}
    settings["federation"]["sites"]["alder"] = {"folder": "/etc", "share": ["personal"]}
    settings["engine"] |= {"device": "meta"}
    settings["output"] = "/etc"
    kind, text = refusal(process, call({**told, "settings": settings}, "open"))
    assert kind == "EgressError"
    assert "'num_examples'" in text


@pytest.mark.parametrize("what", ["manifest", "image", "folder"])
def test_failures_of_a_sites_own_files_tell_their_kind_alone(images, own, told, tmp_path, what):
    place = tmp_path / MARKER
    place.mkdir()
    if what != "folder":
        lines = (images / "alder" / "manifest.csv").read_text().replace("alder/", f"{MARKER}/")
        (place / "manifest.csv").write_text(lines)
    if what == "manifest":
        (place / "manifest.csv").write_bytes(b"\xff\xfe\x00" + MARKER.encode())
    data = replace(own.data, manifest=f"{MARKER}/manifest.csv")
    process = SiteProcess(replace(own, root=str(tmp_path), data=data))
    kind, text = refusal(process, call(told, "open"))
    assert kind == "DataError"
    assert text == (
        "a file, a mask, a table or a split there is unusable; the details are in the log of this "
        "site"
    )


def test_masks_that_changed_since_a_site_began_to_train_are_named_in_its_own_log_alone(
    images, own, told, model, tmp_path, caplog
):
    shutil.copytree(images, tmp_path / "copy")
    moved = replace(own, root=str(tmp_path / "copy"))
    check_answers(SiteProcess(moved), told, model)
    mask = min((tmp_path / "copy/alder/masks").iterdir())
    shutil.copy(max(mask.parent.iterdir()), mask)
    kind, text = refusal(SiteProcess(moved), call(told, "open"))
    assert kind == "DataError"
    assert text.startswith("a file, a mask, a table or a split there is unusable; the details")
    assert f"(another mask of {mask.stem}): put the old data back" in caplog.text
    assert refusal(SiteProcess(moved), call(told), model)[0] == "DataError"


def test_a_state_that_cannot_be_written_tells_no_path(own, told, model):
    process = SiteProcess(own)
    assert process.answer(call(told, "open"), b"") == ({"share": [], "cases": {"": 10}}, b"")
    place = Path(own.state) / "runs" / "tiny" / "fedavg" / "seed-0" / "clients" / "alder"
    place.parent.mkdir(parents=True)
    place.write_text("no folder")
    answer, sent = process.answer(call(told), model)
    kind, _ = told_of(answer.get("error") or unpack(sent)["error"])
    assert kind == "StorageError"
    place.unlink()
    check_answers(process, told, model)


def test_a_state_is_told_while_the_site_is_at_work(process):
    with process._at_work:
        assert process.answer({"do": "state"}, b"")[0] == {"idle": False, "name": "alder"}
    assert process.answer({"do": "state"}, b"")[0] == {"idle": True, "name": "alder"}


def ask(process, *parts):
    """Send bytes to a site process over a connection, and close the other direction."""
    one, other = socket.socketpair()
    thread = threading.Thread(target=process._serve_one, args=(Line(one),))
    thread.start()
    with other:
        for part in parts:
            other.sendall(part)
        other.shutdown(socket.SHUT_WR)
        found = b""
        while data := other.recv(1 << 16):
            found += data
    thread.join()
    return found


def test_what_is_no_frame_is_refused_and_closes_one_connection_alone(process, told, model):
    assert ask(process) == b""
    assert ask(process, b"GET / HTTP/1.0\r\n\r\n") != b""
    assert ask(process, SIZES.pack(2, 10) + b"{}") == b""
    assert b'"code": "protocol"' in ask(process, SIZES.pack(1, 0) + b"3")
    head = json.dumps(call(told)).encode()
    answer = ask(process, SIZES.pack(len(head), len(model)), head, model)
    assert b"seconds" in answer
    assert len(answer) > len(model)


def test_a_message_over_the_sites_limit_is_refused_before_it_is_read(own):
    process = SiteProcess(replace(own, largest=0.001))
    answer = ask(process, SIZES.pack(2, 1001) + b"{}")
    failure = json.loads(answer[SIZES.size :])["error"]
    assert told_of(failure)[1].startswith("a message of 1001 bytes is over the limit of 1000 bytes")
    (line,) = read_ledger(Path(own.state) / "ledger.jsonl")
    assert list(line["parts"]) == ["failure"]


def test_a_failure_that_cannot_be_recorded_stays_at_the_site(process, told):
    Path(process.settings.state, "ledger.jsonl").mkdir(parents=True)
    assert refusal(process, call(told, site="birch"))[0] == "StorageError"


def test_the_kit_and_the_file_are_of_one_site(own, tmp_path):
    check_name(own, Kit(tmp_path, "site", "alder", "localhost", 8002))
    with pytest.raises(ConfigError, match=r"is of 'alder', and the start-up kit .* of 'birch'"):
        check_name(own, Kit(tmp_path, "site", "birch", "localhost", 8002))


def test_paths_in_a_sites_file_start_from_its_folder(own, tmp_path):
    assert own.state == str(tmp_path / "state")
    assert own.socket == tmp_path / "state" / "site.sock"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("accept: some", "accept"),
        ("secret: 1", "secret"),
        ("data: {remote: true, manifest: a.csv}", "a remote site is described in its own file"),
    ],
)
def test_a_sites_file_that_is_wrong_says_where(tmp_path, more, said):
    text = "name: alder\n" + ("" if "data" in more else "data: {folder: x}\n") + more
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_site_settings(tmp_path / "a.yaml")


def test_a_site_trains_as_the_algorithm_of_its_job_says(own, tmp_path, model):
    """An algorithm's own training, and an experiment whose one training is the same."""
    training = {"optimizer": "sgd", "lr": 0.05, "local_steps": 3}
    entry = {"name": "fedavg", "training": training}
    alone = experiment(training={"batch_size": 2, **training})
    replies = {}
    for name, config in {"own": experiment(algorithms=[entry]), "whole": alone}.items():
        settings = replace(own, state=str(tmp_path / name))
        _, data = SiteProcess(settings).answer(call(describe(config)), model)
        replies[name] = data
    assert unpack(replies["own"])["reply"]["progress"]["steps"] == 3
    assert replies["own"] == replies["whole"]


def test_a_site_without_a_compiler_refuses_an_algorithm_that_compiles(process):
    from torch._inductor import config

    entry = {"name": "fedavg", "training": {"compile": "on"}}
    with config.patch({"cpp.cxx": ("/there/is/none",)}):
        kind, text = refusal(process, call(describe(experiment(algorithms=[entry])), "open"))
    assert kind == "ConfigError"
    assert text.startswith("training.compile is on, and site 'alder' cannot compile; have a")
