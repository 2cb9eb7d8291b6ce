"""Kafka's brokers: where they are, how the way to them is protected, and who a client says that it is.

The one place that knows how each client library wants to be told.
"""

import re
import ssl
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar

from confluent_kafka import KafkaError, KafkaException
from msgspec import Struct
from pydantic import SecretStr

from contract.settings import SettingsError

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanism = Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"]

T = TypeVar("T")

_FORBIDDEN: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    }
)
# What does not pass by itself, and the settings to look at.
_ADVICE: Final = {
    KafkaError._AUTHENTICATION: "are kafka_sasl_username and kafka_sasl_password right?",  # noqa: SLF001  its public name
    KafkaError._SSL: "is kafka_ssl_ca_file right, and is the broker's certificate good?",  # noqa: SLF001
}
# librdkafka begins with the name that it gives the broker, and ends with how often and how late it said so.
_TOLD: Final = re.compile(r"\w+://(.*?)/\S+: (.*?)(?: \(after \d+ms in state .*\))?")


class Brokers(Struct, frozen=True):
    """How to reach them.

    Attributes:
        servers: host:port, separated by commas.
        protocol: of the listener there.
        mechanism: of SASL; with it go username and password.
        ca_file: PEM; what signs the brokers' certificates. Empty: the certificates that the system trusts.
        certificate_file: PEM; the client's own, for brokers that ask for one, with its `key_file`.
    """

    servers: str
    protocol: SecurityProtocol = "PLAINTEXT"
    mechanism: SaslMechanism = "SCRAM-SHA-512"
    username: str = ""
    password: SecretStr = SecretStr("")
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""

    def librdkafka(self) -> dict[str, Any]:
        """The settings of a client of confluent-kafka's.

        Raises:
            SettingsError: a file cannot be used.
        """
        settings: dict[str, Any] = {
            "bootstrap.servers": self.servers,
            "security.protocol": self.protocol,
        }
        # Of a file that it cannot use librdkafka has OpenSSL's words to say and no others.
        if self._tls() is not None:
            settings |= {
                "ssl.ca.location": self.ca_file,
                "ssl.certificate.location": self.certificate_file,
                "ssl.key.location": self.key_file,
            }
        if self._sasl:
            settings |= {
                "sasl.mechanism": self.mechanism,
                "sasl.username": self.username,
                "sasl.password": self.password.get_secret_value(),
            }
        return settings

    def aiokafka(self) -> dict[str, Any]:
        """The arguments of a client of aiokafka's.

        Raises:
            SettingsError: a file cannot be used.
        """
        arguments: dict[str, Any] = {
            "bootstrap_servers": self.servers,
            "security_protocol": self.protocol,
            "ssl_context": self._tls(),
        }
        if self._sasl:
            arguments |= {
                "sasl_mechanism": self.mechanism,
                "sasl_plain_username": self.username,
                "sasl_plain_password": self.password.get_secret_value(),
            }
        return arguments

    def faust(self) -> dict[str, Any]:
        """The settings of a Faust app.

        Raises:
            SettingsError: a file cannot be used.
        """
        from faust.auth import SASLCredentials, SSLCredentials  # noqa: PLC0415  takes a second

        context = self._tls()
        credentials: SASLCredentials | SSLCredentials | None = None
        if self._sasl:
            credentials = SASLCredentials(
                username=self.username,
                password=self.password.get_secret_value(),
                mechanism=self.mechanism,
                ssl_context=context,
            )
        elif context is not None:
            credentials = SSLCredentials(context)
        return {
            "broker": [f"kafka://{server}" for server in self.servers.split(",")],
            "broker_credentials": credentials,
        }

    @property
    def _sasl(self) -> bool:
        return self.protocol.startswith("SASL")

    def _tls(self) -> ssl.SSLContext | None:
        if not self.protocol.endswith("SSL"):
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
        except OSError as error:
            raise SettingsError(f"kafka_ssl_ca_file: {self.ca_file}: {error.strerror}") from None
        if self.certificate_file:
            try:
                # A key with a password would be asked for at the terminal.
                context.load_cert_chain(self.certificate_file, self.key_file, password="")
            except OSError as error:
                raise SettingsError(
                    f"kafka_ssl_certificate_file, kafka_ssl_key_file: {self.certificate_file}, {self.key_file}:"
                    f" {error.strerror}"
                ) from None
        return context


def advise(error: KafkaError) -> str:
    """What to look at after an error."""
    if error.code() in _FORBIDDEN:
        return "may this user do that? (deploy/kafka/README.md)"
    return _ADVICE.get(
        error.code(), "are kafka_bootstrap_servers and kafka_security_protocol right?"
    )


class Refusal:
    """Whether brokers refuse a client for who it is, or it them: an `error_cb` of librdkafka's, which goes on trying.

    Attributes:
        reason: one line; None where they do not.
    """

    def __init__(self) -> None:
        self.reason: str | None = None

    def __call__(self, error: KafkaError) -> None:
        """Takes what librdkafka has to tell."""
        if error.code() in _ADVICE:
            told = _TOLD.fullmatch(error.str())
            text = f"{told[1]}: {told[2]}" if told else error.str()
            self.reason = f"kafka {text}; {advise(error)}"

    def ask(self, request: Callable[[], T], poll: Callable[[float], object]) -> T:
        """Asks a broker once.

        Args:
            request: the call.
            poll: the client's own, by which librdkafka tells.

        Raises:
            SettingsError: a refusal is why there was no answer.
            KafkaException: there was none for another reason.
        """
        try:
            answer = request()
        except KafkaException:
            poll(0)
            if self.reason is not None:
                raise SettingsError(self.reason) from None
            raise
        # What one broker said while it was restarted is no reason for what fails later.
        poll(0)
        self.reason = None
        return answer
