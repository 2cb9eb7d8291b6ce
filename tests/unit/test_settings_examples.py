"""The examples of settings name every setting of both sides, with its true default."""

import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from contract.settings import Settings, load_settings
from processor.settings import ProcessorSettings
from smtp_agent.settings import AgentSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
TOML = DEPLOY / "fairpost.toml"
ENV = DEPLOY / "fairpost.env"
FLUENTD = DEPLOY / "fluentd" / "fluent.conf"
SIDES: list[type[Settings]] = [ProcessorSettings, AgentSettings]
NO_FIELD = {"FAIRPOST_CONFIG", "FAIRPOST_MIGRATE_DATABASE", "SEND_EMAIL"}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings but those of a test."""
    for name in os.environ:
        if name.upper().startswith("FAIRPOST_") or name.upper() == "SEND_EMAIL":
            monkeypatch.delenv(name)


def required(side: type[Settings]) -> set[str]:
    """The settings that have no default."""
    return {name for name, field in side.model_fields.items() if field.is_required()}


def defaults(side: type[Settings]) -> dict[str, Any]:
    """The settings that have a default, with it."""
    return {
        name: field.default
        for name, field in side.model_fields.items()
        if not field.is_required() and field.default is not None
    }


def optional(side: type[Settings]) -> set[str]:
    """The settings without which something is not limited: an example stands for them."""
    return {
        name
        for name, field in side.model_fields.items()
        if not field.is_required() and field.default is None and not of_secret(name)
    }


def of_secret(name: str) -> bool:
    """Whether a setting, or its variable, names the file of a secret, which goes without the secret itself."""
    secret = name.lower().removeprefix("fairpost_").removesuffix("_file")
    return name.lower().endswith("_file") and any(secret in side.model_fields for side in SIDES)


def plainly(value: object) -> object:
    """A default as TOML has it."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return str(value) if isinstance(value, Path) else value


def variable(setting: str) -> str:
    """The variable of a setting."""
    return f"FAIRPOST_{setting.upper()}"


def uncommented(text: str) -> str:
    """The example with every commented-out setting taken in; prose has a space after its #."""
    return re.sub(r"^#(?=\w+ ?=)", "", text, flags=re.MULTILINE)


def variables() -> dict[str, str]:
    """What the environment file would set, its comments taken away, as a shell reads it."""
    found: dict[str, str] = {}
    for line in uncommented(ENV.read_text()).splitlines():
        words = shlex.split(line, comments=True)
        assert len(words) <= 1, line
        for word in words:
            name, _, value = word.partition("=")
            assert name not in found, name
            found[name] = value
    return found


# ------------------------------------------------------------------ the TOML file


@pytest.mark.parametrize("side", SIDES)
def test_the_file_loads(side: type[Settings]) -> None:
    """As it is, the file sets what has no default and leaves the rest alone."""
    loaded = load_settings(side, TOML)
    assert loaded.model_fields_set == required(side)
    for name, default in defaults(side).items():
        assert getattr(loaded, name) == default


@pytest.mark.parametrize("side", SIDES)
def test_the_file_names_every_setting(side: type[Settings]) -> None:
    """No setting is missing, and none is there that is none."""
    table = tomllib.loads(uncommented(TOML.read_text()))[side.table]
    assert set(table) == set(side.model_fields)


@pytest.mark.parametrize("side", SIDES)
def test_the_file_shows_true_defaults(side: type[Settings], tmp_path: Path) -> None:
    """What is commented out changes nothing when it is taken in, but where nothing is the default."""
    file = tmp_path / "fairpost.toml"
    file.write_text(
        "\n".join(
            line
            for line in uncommented(TOML.read_text()).splitlines()
            if not of_secret(line.partition(" =")[0])
        )
    )
    given, plain = load_settings(side, file), load_settings(side, TOML)
    differs = {n for n in side.model_fields if getattr(given, n) != getattr(plain, n)}
    assert differs == optional(side)
    table = tomllib.loads(file.read_text())[side.table]
    for name, default in defaults(side).items():
        shown = table[name]
        assert plainly(default) == (tuple(shown) if isinstance(shown, list) else shown)


def test_every_setting_is_explained() -> None:
    """Each run of settings in either example has a comment right above it."""
    for file in (TOML, ENV):
        paragraphs = file.read_text().split("\n\n")
        for paragraph in paragraphs:
            lines = paragraph.splitlines()
            settings = [n for n, line in enumerate(lines) if re.match(r"#?\w+ ?=", line)]
            if settings:
                assert lines[settings[0] - 1].startswith("# "), paragraph
                assert settings[0] > 0, paragraph


# ------------------------------------------------------------------ the environment file


def test_the_environment_file_sets_nothing() -> None:
    """Installed as it is, it does not override a settings file."""
    for line in ENV.read_text().splitlines():
        assert not line or line.startswith("#")


def test_the_environment_file_names_every_variable() -> None:
    """Those of both sides, of the command lines and of Fluentd, and no other."""
    ours = {variable(name) for side in SIDES for name in side.model_fields}
    fluentds = set(re.findall(r"ENV\['(\w+)'\]", FLUENTD.read_text()))
    assert fluentds
    assert set(variables()) == ours | fluentds | NO_FIELD


@pytest.mark.parametrize("side", SIDES)
def test_the_environment_file_shows_true_defaults(
    side: type[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken in, every variable is understood, and gives the default where there is one."""
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    for name, value in variables().items():
        if not of_secret(name):
            monkeypatch.setenv(name, value)
    loaded = load_settings(side, empty)
    for name, default in defaults(side).items():
        assert getattr(loaded, name) == default, name


def test_the_environment_file_shows_fluentds_defaults() -> None:
    """What it says of Fluentd is what fluent.conf falls back on."""
    shown = variables()
    fallbacks = re.findall(r"ENV\['(\w+)'\] \|\| '([^']*)'", FLUENTD.read_text())
    assert fallbacks
    for name, fallback in fallbacks:
        assert shown[name] == fallback


def test_both_examples_show_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no default has the same example in both, but for the roles of the database."""
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    from_file = [load_settings(side, TOML) for side in SIDES]
    for name, value in variables().items():
        if not of_secret(name):
            monkeypatch.setenv(name, value)
    for side, of_file in zip(SIDES, from_file, strict=True):
        of_environment = load_settings(side, empty)
        for name in required(side):
            value = getattr(of_file, name)
            if not isinstance(value, SecretStr):
                assert getattr(of_environment, name) == value


def test_settings_of_both_sides_are_marked() -> None:
    """A variable that both sides read stands in the part that says so."""
    both = set(ProcessorSettings.model_fields) & set(AgentSettings.model_fields)
    _, _, rest = ENV.read_text().partition("read by both sides\n")
    part = rest.partition("\n# ----")[0]
    named = set(re.findall(r"^#(\w+)=", part, re.MULTILINE))
    assert named == {variable(name) for name in both} | {"SEND_EMAIL"}
