"""Brokers: what each client library is told, and what is said of what cannot be used."""

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from pydantic import SecretStr

from contract.settings import SettingsError
from processor.brokers import Brokers, Refusal, SecurityProtocol
from testbed.certificates import Authority

SECRET = "correct-horse"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority with a client's certificate `client`."""
    authority = Authority(tmp_path_factory.mktemp("authority"))
    authority.sign("client")
    return authority


def brokers(protocol: SecurityProtocol, authority: Authority) -> Brokers:
    """Brokers with all that can be said."""
    folder = authority.certificate.parent
    return Brokers(
        "a:1,b:2",
        protocol,
        "SCRAM-SHA-256",
        "worker",
        SecretStr(SECRET),
        str(authority.certificate),
        f"{folder}/client.pem",
        f"{folder}/client.key",
    )


@pytest.mark.parametrize(
    ("protocol", "tls", "sasl"),
    [
        ("PLAINTEXT", False, False),
        ("SSL", True, False),
        ("SASL_PLAINTEXT", False, True),
        ("SASL_SSL", True, True),
    ],
)
def test_each_library_is_told_the_same(
    authority: Authority, protocol: SecurityProtocol, *, tls: bool, sasl: bool
) -> None:
    """TLS and login are asked for where the protocol has them, and nothing is said of them where it has not."""
    told = brokers(protocol, authority)
    librdkafka = told.librdkafka()
    assert librdkafka["bootstrap.servers"] == "a:1,b:2"
    assert librdkafka["security.protocol"] == protocol
    assert ("ssl.ca.location" in librdkafka) == tls
    assert librdkafka.get("sasl.password") == (SECRET if sasl else None)

    aiokafka = told.aiokafka()
    assert aiokafka["security_protocol"] == protocol
    assert (aiokafka["ssl_context"] is not None) == tls
    if tls:
        assert aiokafka["ssl_context"].check_hostname
    assert aiokafka.get("sasl_plain_password") == (SECRET if sasl else None)

    faust = told.faust()
    assert faust["broker"] == ["kafka://a:1", "kafka://b:2"]
    assert protocol_of(faust["broker_credentials"]) == protocol


def protocol_of(credentials: Any) -> str:
    """The protocol by which Faust's own clients connect."""
    from faust.transport.drivers.aiokafka import (  # noqa: PLC0415  takes a second
        credentials_to_aiokafka_auth,
    )

    return str(credentials_to_aiokafka_auth(credentials)["security_protocol"])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"ca_file": "/nowhere"}, "kafka_ssl_ca_file: /nowhere: No such file or directory"),
        ({"certificate_file": "/nowhere"}, "kafka_ssl_certificate_file, kafka_ssl_key_file: /nowh"),
        ({"key_file": "/nowhere"}, "kafka_ssl_certificate_file, kafka_ssl_key_file: "),
        ({"ca_file": "{folder}/client.key"}, "kafka_ssl_ca_file: {folder}/client.key: "),
        ({"key_file": "{folder}/ca.key"}, "kafka_ssl_certificate_file, kafka_ssl_key_file: "),
    ],
)
def test_files_that_cannot_be_used(
    authority: Authority, change: dict[str, str], complaint: str
) -> None:
    """A file that is missing, holds something else or another's key is told in one line that names the setting."""
    folder = str(authority.certificate.parent)
    values = {name: value.format(folder=folder) for name, value in change.items()}
    wrong = Brokers(**{**as_arguments(brokers("SSL", authority)), **values})
    for tell in (wrong.librdkafka, wrong.aiokafka, wrong.faust):
        with pytest.raises(SettingsError) as error:
            tell()
        assert str(error.value).startswith(complaint.format(folder=folder))
        assert "\n" not in str(error.value)


def as_arguments(brokers: Brokers) -> dict[str, Any]:
    """What they were made of."""
    return {name: getattr(brokers, name) for name in brokers.__struct_fields__}


def no_answer() -> None:
    """A request while no broker is there."""
    raise KafkaException(KafkaError(KafkaError._TRANSPORT))  # noqa: SLF001  its public name


def test_a_refusal_is_why_there_is_no_answer() -> None:
    """What librdkafka told meanwhile is raised in place of its error, shortened to what a person needs."""
    refusal = Refusal()
    with pytest.raises(KafkaException):
        refusal.ask(no_answer, lambda _: None)
    told = KafkaError(
        KafkaError._AUTHENTICATION,  # noqa: SLF001  its public name
        "sasl_ssl://kafka.example:9093/bootstrap: SASL authentication error: no (after 312ms in state AUTH_REQ, 3"
        " identical error(s) suppressed)",
    )
    with pytest.raises(SettingsError) as error:
        refusal.ask(no_answer, lambda _: refusal(told))
    assert str(error.value) == (
        "kafka kafka.example:9093: SASL authentication error: no;"
        " are kafka_sasl_username and kafka_sasl_password right?"
    )


def test_an_outage_is_no_refusal() -> None:
    """What passes by itself stays what it is."""
    refusal = Refusal()
    refusal(KafkaError(KafkaError._ALL_BROKERS_DOWN, "2/2 brokers are down"))  # noqa: SLF001  its public name
    assert refusal.reason is None
    assert refusal.ask(lambda: 7, lambda _: None) == 7
