"""What a start-up kit tells FLARE before each start."""

import json
from pathlib import Path

from collegium.distributed.kits import SHARED, Kit, write_settings


def written(folder: Path) -> Path:
    """The folder of settings of a site's kit, written from defaults such as FLARE's."""
    (folder / "local").mkdir()
    defaults = {
        "class_allow_list": ["nvflare."],
        "allow_log_streaming": True,
        "components": [
            {"id": "site_log_streamer", "path": "x"},
            {"id": "job_manager", "path": "y", "args": {"uri_root": f"{SHARED}/jobs-storage"}},
        ],
    }
    (folder / "local" / "resources.json.default").write_text(json.dumps(defaults))
    write_settings(Kit(folder, "site", "north", "localhost", 8002))
    return folder / "local"


def test_processes_of_one_machine_need_the_kits_key_to_speak_to_each_other(tmp_path: Path):
    found = json.loads((written(tmp_path) / "comm_config.json").read_text())
    assert found["internal"]["resources"]["connection_security"] == "mtls"
    assert found["internal"]["resources"]["host"] == "localhost"


def test_a_site_sends_no_log_and_keeps_its_jobs_to_itself(tmp_path: Path):
    found = json.loads((written(tmp_path) / "resources.json").read_text())
    assert found["allow_log_streaming"] is False
    (manager,) = found["components"]
    assert manager["args"]["uri_root"] == f"{tmp_path / 'store'}/jobs-storage"
    assert "nvflare." not in found["class_allow_list"]
