"""Settings of the processor: table `[processor]`, variables `FAIRPOST_…` (annotated in `deploy/fairpost.toml`)."""

from typing import Annotated, ClassVar, Literal
from zoneinfo import ZoneInfo

from pydantic import AliasChoices, Field, field_validator

from contract import events
from contract.database import Dsn
from contract.fail_points import Probabilities, WorkerFailPoint
from contract.settings import Settings

Port = Annotated[int, Field(ge=0, le=65535)]


class ProcessorSettings(Settings):
    """What a worker, a tracker and the command line need to know."""

    table: ClassVar[str] = "processor"

    database: Dsn
    kafka_bootstrap_servers: Annotated[str, Field(min_length=1)]
    topic_prefix: Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{0,64}$")] = ""
    send_email: Annotated[
        bool,
        Field(validation_alias=AliasChoices("SEND_EMAIL", "FAIRPOST_SEND_EMAIL", "send_email")),
    ] = True
    reservation_block_size: Annotated[int, Field(ge=1, le=10_000)] = 200
    batch_size: Annotated[int, Field(ge=1, le=10_000)] = 1_200
    planning: bool = True
    stall_seconds: Annotated[float, Field(ge=1, le=3600)] = 60
    log_timezone: str = "UTC"
    metrics_host: str = "127.0.0.1"
    worker_metrics_port: Port = 9701
    tracker_metrics_port: Port = 9702
    metrics_campaigns: Annotated[int, Field(ge=0, le=200)] = 20
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    fail_points: Probabilities[WorkerFailPoint] = {}  # noqa: RUF012  copied

    @field_validator("log_timezone")
    @classmethod
    def _is_a_timezone(cls, value: str) -> str:
        try:
            ZoneInfo(value)
        except (KeyError, ValueError, OSError):
            raise ValueError(f"{value!r} is no time zone of the tz database") from None
        return value

    def topic(self, name: str) -> str:
        """The topic's name in this installation."""
        return self.topic_prefix + name

    def group(self, process: str) -> str:
        """The consumer group of a kind of process."""
        return f"{self.topic_prefix}fairpost-{process}"

    @property
    def topics(self) -> tuple[str, ...]:
        """Every topic of the installation, by its full name."""
        return tuple(
            self.topic(name)
            for name in (
                events.CAMPAIGNS,
                events.DUE_EMAILS,
                events.SEND_EMAILS,
                events.DELIVERY_LOG,
                events.DELIVERY_STATUS,
                events.DEAD_LETTERS,
            )
        )
