"""Settings of the processor: table `[processor]`, variables `FAIRPOST_…` (annotated in `deploy/fairpost.toml`)."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import AliasChoices, Field, SecretStr, field_validator, model_validator

from contract import events
from contract.database import Dsn
from contract.fail_points import Probabilities, WorkerFailPoint
from contract.settings import Settings
from processor.brokers import Brokers, SaslMechanism, SecurityProtocol

Port = Annotated[int, Field(ge=0, le=65535)]


class ProcessorSettings(Settings):
    """What a worker, a tracker and the command line need to know."""

    table: ClassVar[str] = "processor"

    database: Dsn
    database_file: Path | None = None
    kafka_bootstrap_servers: Annotated[str, Field(min_length=1)]
    kafka_security_protocol: SecurityProtocol = "PLAINTEXT"
    kafka_sasl_mechanism: SaslMechanism = "SCRAM-SHA-512"
    kafka_sasl_username: str = ""
    kafka_sasl_password: SecretStr = SecretStr("")
    kafka_sasl_password_file: Path | None = None
    kafka_ssl_ca_file: str = ""
    kafka_ssl_certificate_file: str = ""
    kafka_ssl_key_file: str = ""
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

    @model_validator(mode="after")
    def _says_who_it_is(self) -> Self:
        sasl = self.kafka_security_protocol.startswith("SASL")
        if sasl and not (self.kafka_sasl_username and self.kafka_sasl_password.get_secret_value()):
            raise ValueError(
                f"kafka_security_protocol: {self.kafka_security_protocol} needs kafka_sasl_username and"
                " kafka_sasl_password"
            )
        if bool(self.kafka_ssl_certificate_file) != bool(self.kafka_ssl_key_file):
            raise ValueError(
                "kafka_ssl_certificate_file and kafka_ssl_key_file: one needs the other"
            )
        return self

    @property
    def brokers(self) -> Brokers:
        """How to reach Kafka."""
        return Brokers(
            self.kafka_bootstrap_servers,
            self.kafka_security_protocol,
            self.kafka_sasl_mechanism,
            self.kafka_sasl_username,
            self.kafka_sasl_password,
            self.kafka_ssl_ca_file,
            self.kafka_ssl_certificate_file,
            self.kafka_ssl_key_file,
        )

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
