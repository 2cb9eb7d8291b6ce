"""Where settings come from: the environment first, then a table of a TOML file.

A secret may stand in a file of its own, which a setting of its name and `_file` names: a credential of systemd's, a
secret of a container.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from contract.given_files import FileError, read_toml

DEFAULT_FILE: Final = Path("/etc/fairpost/fairpost.toml")


class SettingsError(ValueError):
    """A setting cannot be used; the text is one line: where it stands, its name, what is wrong."""


class Settings(BaseSettings):
    """The settings of one side; `table` is its table in the file, `FAIRPOST_` the prefix of its variables."""

    model_config = SettingsConfigDict(
        env_prefix="FAIRPOST_", extra="forbid", frozen=True, hide_input_in_errors=True
    )
    table: ClassVar[str]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003  pydantic passes its own sources
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment goes before the file, whose table is given to the constructor."""
        assert isinstance(init_settings, InitSettingsSource)  # noqa: S101  for the type checker
        return _SecretFiles(settings_cls, env_settings), _SecretFiles(settings_cls, init_settings)


class _SecretFiles(PydanticBaseSettingsSource):
    """A source in which a file may stand for the secret that it holds."""

    def __init__(self, kind: type[BaseSettings], source: PydanticBaseSettingsSource) -> None:
        super().__init__(kind)
        self._source = source

    def __call__(self) -> dict[str, Any]:
        values = self._source()
        for setting in self.settings_cls.model_fields:
            file = values.get(f"{setting}_file")
            if file is None:
                continue
            if setting in values:
                raise SettingsError(f"{setting}, {setting}_file: both are set; take one away")
            values[setting] = _read_secret(f"{setting}_file", Path(str(file)))
        return values

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._source.get_field_value(field, field_name)


def _read_secret(setting: str, file: Path) -> str:
    try:
        secret = file.read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as error:
        raise SettingsError(f"{setting}: {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{setting}: {file}: is no text") from None
    if not secret:
        raise SettingsError(f"{setting}: {file}: is empty")
    return secret


S = TypeVar("S", bound=Settings)


def load_settings(kind: type[S], file: Path | None) -> S:
    """Reads the settings of one side.

    Args:
        kind: which side.
        file: the TOML file; None: `DEFAULT_FILE` where it exists.

    Raises:
        SettingsError: the file cannot be read, or a value is wrong, unknown or missing.
    """
    values = _read_table(file or DEFAULT_FILE, kind.table, must_exist=file is not None)
    try:
        return kind(**values)
    except ValidationError as error:
        raise SettingsError("; ".join(_complaint(kind, e) for e in error.errors())) from None


def _read_table(file: Path, table: str, *, must_exist: bool) -> dict[str, Any]:
    try:
        document = read_toml(file)
    except FileNotFoundError:
        if must_exist:
            raise SettingsError(f"{file}: no such file") from None
        return {}
    except FileError as error:
        raise SettingsError(f"{file}: {error}") from None
    values = document.get(table, {})
    if not isinstance(values, dict):
        raise SettingsError(f"{file}: [{table}] is no table")
    return values


def _complaint(kind: type[Settings], error: Mapping[str, Any]) -> str:
    if not error["loc"]:  # of several settings, which the text names
        return str(error["msg"]).removeprefix("Value error, ")
    name = str(error["loc"][0])
    # A variable that stands under a name of its own is reported by pydantic under that name.
    variable = name if name.isupper() else f"FAIRPOST_{name.upper()}"
    match error["type"]:
        case "missing":
            return f"{name}: is not set; put it into [{kind.table}] of the settings file or into {variable}"
        case "extra_forbidden":
            return f"{name}: no such setting in [{kind.table}]"
        case _:
            reason = str(error["msg"]).removeprefix("Value error, ")
            return f"{name}: {reason} ([{kind.table}] or {variable})"
