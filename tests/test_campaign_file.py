"""The campaign file: what is refused says where and how to mend it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from mdcampaign.campaign_file import POLICY_KEYS, CampaignFile, load_campaign_file
from mdcampaign.errors import BadCampaignFile
from mdcampaign.scheduling.policy import Policy

GOOD = """\
name: quickstart
thinker: ../workflows/ensemble.py:Ensemble
parameters:
  replicas: 24
executor:
  slots_per_device: 2
  preempt_gap: 5
"""


@pytest.fixture
def write(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "workflows").mkdir()
    (tmp_path / "workflows" / "ensemble.py").write_text("class Ensemble: ...")

    def write(text: str) -> Path:
        path = tmp_path / "configs" / "quickstart.yaml"
        path.write_text(text)
        return path

    return write


def test_a_campaign_file(write, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = load_campaign_file(write(GOOD))
    assert file.directory == tmp_path / "campaigns" / "quickstart"
    assert (file.thinker_file, file.thinker_class) == (tmp_path / "workflows" / "ensemble.py", "Ensemble")
    assert file.parameters == {"replicas": 24}
    assert file.executor.policy() == {"preempt_gap": 5}
    assert file.executor.executor() == {"slots_per_device": 2}
    assert file.queues == "pipe"


def test_what_is_run_can_be_run_again(write, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = load_campaign_file(write(GOOD))
    (tmp_path / "campaign.yaml").write_text(file.as_yaml())
    assert load_campaign_file(tmp_path / "campaign.yaml") == file


def test_every_policy_can_be_set() -> None:
    assert {field.name for field in fields(Policy)} == set(POLICY_KEYS)
    assert set(POLICY_KEYS) < set(CampaignFile.model_fields["executor"].annotation.model_fields)


def test_redis_and_a_parsl_config(write, tmp_path) -> None:
    (tmp_path / "configs" / "slurm.py").write_text("config = None")
    text = GOOD.partition("executor:")[0]
    file = load_campaign_file(write(text + "executor: {config: slurm.py}\nqueues: redis\nredis: {port: 7000}\n"))
    assert file.executor.config == str(tmp_path / "configs" / "slurm.py")
    assert (file.redis.host, file.redis.port) == ("localhost", 7000)


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        (GOOD + "thinkr: x\n", "thinkr", r"unknown key .*line 8.*got 'x'.*Did you mean 'thinker'"),
        (GOOD + "  slot_per_device: 3\n", "executor.slot_per_device", r"line 8.*Did you mean 'slots_per_device'"),
        (GOOD.replace("gap: 5", "gap: 0"), "executor.preempt_gap", r"greater than 0.*line 7.*got 0"),
        (GOOD.replace("device: 2", "device: '2'"), "executor.slots_per_device", r"valid integer.*line 6.*got '2'"),
        (GOOD.replace("name: quickstart\n", ""), "name", r"required key is missing.*Add 'name'"),
        (GOOD.replace("quickstart", "a b"), "name", r"line 1.*Use letters"),
        (GOOD.replace("ensemble.py", "ensembel.py"), "thinker", r"no such file .*line 2.*looked for as /"),
        (GOOD.replace(":Ensemble", ""), "thinker", r"line 2.*Give FILE.py:CLASS"),
        (GOOD + "name: again\n", "name", r"given twice.*line 8"),
        (GOOD + "  config: slurm.py\n", "executor.config", r"no such file.*line 8"),
        (GOOD + "  config: ../workflows/ensemble.py\n", "executor.preempt_gap", r"cannot stand beside config.*line 7"),
        (GOOD + "queues: pipes\n", "queues", r"'pipe' or 'redis'.*line 8"),
        (GOOD + "redis: {port: 1}\n", "redis", r"line 8.*Add `queues: redis`"),
        ("- a\n", "campaign file", "has no keys"),
        ("", "campaign file", "has no keys"),
        ("name: [\n", "campaign file", r"no YAML.*line 2"),
    ],
)
def test_bad_files_are_refused_in_words(write, text, field, says) -> None:
    with pytest.raises(BadCampaignFile, match=says) as refused:
        load_campaign_file(write(text))
    assert refused.value.field == field


def test_a_missing_file(tmp_path) -> None:
    with pytest.raises(BadCampaignFile, match="No such file"):
        load_campaign_file(tmp_path / "none.yaml")


def test_the_dump_is_plain_yaml(write) -> None:
    assert yaml.safe_load(load_campaign_file(write(GOOD)).as_yaml())["executor"] == {
        "slots_per_device": 2,
        "preempt_gap": 5.0,
    }
