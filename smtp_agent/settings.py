"""Settings of an agent: table `[agent]`, variables `FAIRPOST_…` (annotated in `deploy/fairpost.toml`)."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AliasChoices, Field, field_validator
from pydantic_settings import NoDecode

from contract.addresses import mail_domain
from contract.database import Dsn
from contract.fail_points import AgentFailPoint, Probabilities
from contract.settings import Settings

Port = Annotated[int, Field(ge=0, le=65535)]
OperatorName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")]


class AgentSettings(Settings):
    """What the agent beside one Postfix needs to know."""

    table: ClassVar[str] = "agent"

    instance: Annotated[str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}$")]
    database: Dsn
    database_file: Path | None = None
    bounce_domain: Annotated[str, Field(pattern=r"^[a-z0-9-]+(\.[a-z0-9-]+)+$")]
    send_email: Annotated[
        bool,
        Field(validation_alias=AliasChoices("SEND_EMAIL", "FAIRPOST_SEND_EMAIL", "send_email")),
    ] = True
    operators: Annotated[tuple[OperatorName, ...], NoDecode] = ()
    max_chunks: Annotated[int, Field(ge=1)] | None = None
    feed_host: str = "127.0.0.1"
    feed_port: Annotated[int, Field(ge=1, le=65535)] = 2525
    feed_connections: Annotated[int, Field(ge=1, le=100)] = 5
    lease_seconds: Annotated[float, Field(ge=3, le=600)] = 30
    audit_seconds: Annotated[float, Field(ge=1)] = 3600
    audit_age_seconds: Annotated[float, Field(ge=1)] = 600
    drain_seconds: Annotated[float, Field(ge=1, le=600)] = 10
    postfix_config_directory: Path = Path("/etc/postfix")
    lock_directory: Path = Path("/run/fairpost")
    machine_id_file: Path = Path("/etc/machine-id")
    fluentd_host: str = "127.0.0.1"
    fluentd_port: Port = 24224
    metrics_host: str = "127.0.0.1"
    metrics_port: Port = 9703
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    fail_points: Probabilities[AgentFailPoint] = {}  # noqa: RUF012  copied

    @field_validator("bounce_domain")
    @classmethod
    def _check_domain(cls, value: str) -> str:
        """As rendering will, which would otherwise refuse every message."""
        return mail_domain(value)

    @field_validator("operators", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """In the environment they are one string, with commas."""
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(",") if name.strip())
        return value
