"""Where settings come from: the environment first, then a table of a TOML file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from pydantic import ValidationError
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
        settings_cls: type[BaseSettings],  # noqa: ARG003  pydantic passes its own sources
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment goes before the file, whose table is given to the constructor."""
        assert isinstance(init_settings, InitSettingsSource)  # noqa: S101  for the type checker
        return env_settings, init_settings


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
    name = str(error["loc"][0]) if error["loc"] else kind.table
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
