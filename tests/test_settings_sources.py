"""Settings: which source wins, what is refused and how, and that the example is complete."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from services.deployment import (
    Api,
    Ports,
    RoleOverrides,
    child_environment,
    child_spec,
    plan,
    requested_address,
    write_settings,
)
from services.settings import (
    DraftSettings,
    Origin,
    RoleSettings,
    SchedulerSettings,
    SettingsError,
    TargetSettings,
    UpSettings,
    load,
)
from services.start_error import StartError
from services.torch_threads import AWAKE

EXAMPLE = Path(__file__).parent.parent / "outrider.example.yaml"
KINDS: list[type[RoleSettings]] = [UpSettings, SchedulerSettings, TargetSettings, DraftSettings]


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OUTRIDER_"):
            monkeypatch.delenv(name)


def settings_file(folder: Path, text: str) -> Path:
    path = folder / "outrider.yaml"
    path.write_text(text)
    return path


def test_flag_before_environment_before_file_before_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = settings_file(tmp_path, "target: {token_budget: 1, prefill_chunk: 1, max_sequences: 1}")
    monkeypatch.setenv("OUTRIDER_PREFILL_CHUNK", "2")
    monkeypatch.setenv("OUTRIDER_MAX_SEQUENCES", "2")
    loaded = load(TargetSettings, path, {"max_sequences": "3", "threads": None})
    settings = loaded.settings
    assert (settings.token_budget, settings.prefill_chunk, settings.max_sequences) == (1, 2, 3)
    assert settings.held_blocks == TargetSettings.model_fields["held_blocks"].default
    origins = [loaded.origins[name] for name in ("held_blocks", "token_budget", "prefill_chunk", "max_sequences")]
    assert origins == [Origin.DEFAULT, Origin.FILE, Origin.ENVIRONMENT, Origin.FLAG]
    assert loaded.sources["prefill_chunk"] == "environment OUTRIDER_PREFILL_CHUNK"
    assert loaded.sources["max_sequences"] == "flag --max-sequences"
    assert not loaded.given("threads")


def test_the_variable_of_a_role_comes_before_the_common_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_THREADS", "1")
    monkeypatch.setenv("OUTRIDER_DRAFT_THREADS", "2")
    assert load(TargetSettings).settings.threads == 1
    assert load(DraftSettings).settings.threads == 2


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CONFIG", str(settings_file(tmp_path, "scheduler: {draft_length: 7}")))
    assert load(SchedulerSettings).settings.draft_length == 7


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("token_budget", "0", "greater than or equal to 1"),
        ("kv_memory", "2 apples", "2GiB"),
        ("listen", "nowhere", "HOST:PORT"),
        ("listen", "unix:/" + "x" * 107, "107"),
        ("dtype", "int3", "'fp32'"),
        ("device", "tpu", "pattern"),
        ("log_level", "loud", "'warning'"),
    ],
)
def test_a_wrong_value_is_one_line_with_field_value_source_and_range(field: str, value: str, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(TargetSettings, None, {field: value})
    message = str(caught.value)
    assert message.startswith(f"{field} is {value!r} (flag --{field.replace('_', '-')})")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("target: {treads: 2}", "unknown setting 'treads' in section 'target'"),
        ("tarket: {}", "unknown section 'tarket'"),
        ("target: [1]", "section 'target'"),
        ("- 1", "must hold sections"),
        ("target: {", "not YAML"),
    ],
)
def test_what_a_file_may_not_hold_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)) as caught:
        load(TargetSettings, settings_file(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read settings file"):
        load(TargetSettings, tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2**31), ("1.5 GiB", 3 * 2**29), ("64MB", 64 * 10**6), ("2097152", 2**21)]
)
def test_sizes(text: str, size: int) -> None:
    assert load(TargetSettings, None, {"kv_memory": text}).settings.kv_memory == size


def test_lists_from_environment_and_from_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_TARGETS", "a:1, b:2")
    loaded = load(SchedulerSettings, None, {"drafters": ["c:3", "unix:/tmp/d,e:5"]})
    assert loaded.settings.targets == ("a:1", "b:2")
    assert loaded.settings.drafters == ("c:3", "unix:/tmp/d", "e:5")


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_holds_every_setting_with_its_default(kind: type[RoleSettings]) -> None:
    text = EXAMPLE.read_text()
    section = text.split(f"\n{kind.section}:\n")[1].split("\n\n")[0]
    named = re.findall(r"^  (?:# (?=\w+_id: ))?(\w+):", section, re.MULTILINE)
    assert named == list(kind.model_fields)
    loaded, default = load(kind, EXAMPLE).settings, load(kind).settings
    for field in yaml.safe_load(text)[kind.section]:
        assert getattr(loaded, field) == getattr(default, field), field


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_is_described(kind: type[RoleSettings]) -> None:
    assert [name for name, field in kind.model_fields.items() if not field.description] == []


def test_a_secret_is_not_shown() -> None:
    assert "hush" not in repr(load(SchedulerSettings, None, {"secret": "hush", "api_keys": "hush"}))


def test_the_roles_settings_become_their_configs() -> None:
    target = load(TargetSettings, None, {"worker_id": "t", "secret": "s", "token_budget": 9}).settings.target_config()
    assert (target.worker_id, target.secret, target.token_budget) == ("t", b"s", 9)
    draft = load(DraftSettings, None, {"worker_id": "d", "max_batch": 3}).settings.draft_config()
    assert (draft.worker_id, draft.max_batch) == ("d", 3)
    scheduler = load(SchedulerSettings, None, {"policy": "fixed", "draft_length": 2}).settings.scheduler_config()
    assert (scheduler.policy.value, scheduler.draft_length) == ("fixed", 2)


# `outrider up`: settings of its children


def test_up_gives_each_worker_a_socket_a_name_and_one_secret(tmp_path: Path) -> None:
    deployment = plan(
        load(UpSettings, None, {"targets": 2, "drafts": 1, "model": "m"}),
        RoleOverrides.read(None),
        tmp_path,
        Ports(5, 6),
    )
    assert [target.worker_id for target in deployment.targets] == ["target-1", "target-2"]
    assert {target.model for target in deployment.targets} == {"m"}
    assert deployment.scheduler.targets == tuple(target.listen for target in deployment.targets)
    assert deployment.scheduler.drafters == (f"unix:{tmp_path}/draft-1.sock",)
    secrets = {worker.secret_bytes for worker in (*deployment.targets, *deployment.drafts, deployment.scheduler)}
    assert len(secrets) == 1
    assert len(secrets.pop()) >= 32


def test_variables_of_the_deployment_do_not_reach_a_role_by_accident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_MODEL", "big")
    monkeypatch.setenv("OUTRIDER_TARGETS", "2")
    monkeypatch.setenv("OUTRIDER_SECRET", "shared")
    monkeypatch.setenv("OUTRIDER_DRAFT_MAX_WIDTH", "3")
    deployment = plan(load(UpSettings), RoleOverrides.read(None), tmp_path, Ports(5, 6))
    assert len(deployment.targets) == 2
    assert deployment.drafts[0].model is None
    assert deployment.drafts[0].max_width == 3
    assert deployment.targets[0].secret_bytes == b"shared"
    environment = child_environment(deployment.targets[0])
    assert not {"OUTRIDER_MODEL", "OUTRIDER_SECRET", "OUTRIDER_TARGETS"} & environment.keys()
    assert (environment["OMP_WAIT_POLICY"], environment["GOMP_SPINCOUNT"]) == ("passive", AWAKE)
    asked = child_environment(deployment.targets[0], {"GOMP_SPINCOUNT": "7"})
    assert asked["GOMP_SPINCOUNT"] == "7"


def test_several_models_take_turns_unless_their_threads_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)

    def turns(**flags: object) -> list[bool | None]:
        deployment = plan(load(UpSettings, None, flags), RoleOverrides.read(None), tmp_path, Ports(5, 6))
        return [worker.cpu_turns for worker in (*deployment.targets, *deployment.drafts)]

    assert turns(drafter="ngram") == [False, False]
    assert turns(draft_model="small") == [True, True]
    assert turns(draft_model="small", threads=1) == [False, False]


def test_a_settings_file_of_a_child_reads_back_and_is_private(tmp_path: Path) -> None:
    deployment = plan(load(UpSettings), RoleOverrides.read(None), tmp_path, Ports(5, 6))
    path = tmp_path / "target.yaml"
    write_settings(path, deployment.targets[0])
    assert load(TargetSettings, path).settings == deployment.targets[0]
    assert path.stat().st_mode & 0o077 == 0


def test_the_secret_is_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_SECRET", "hush-hush")
    deployment = plan(load(UpSettings), RoleOverrides.read(None), tmp_path, Ports(5, 6))
    for settings in (deployment.scheduler, *(worker.settings for worker in deployment.workers)):
        child = child_spec(tmp_path, "child", settings)
        assert "hush-hush" not in " ".join(child.command)
        assert "hush-hush" not in child.environment.values()


def test_a_model_drafter_without_a_model_is_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--draft-model"):
        plan(load(UpSettings, None, {"drafter": "model"}), RoleOverrides.read(None), tmp_path, Ports(5, 6))


@pytest.mark.parametrize("api", Api)
def test_the_port_of_the_schedulers_section_counts_unless_up_names_one(tmp_path: Path, api: Api) -> None:
    path = settings_file(tmp_path, f"scheduler: {{{api.value}_port: 7, {api.value}_host: localhost}}")
    assert requested_address(load(UpSettings, path), RoleOverrides.read(path), api) == ("localhost", 7)
    up = load(UpSettings, path, {f"{api.value}_port": "8"})
    assert requested_address(up, RoleOverrides.read(path), api) == ("localhost", 8)
