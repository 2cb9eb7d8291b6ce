"""Apache Kafka: one node, broker and controller in one (KRaft)."""

from __future__ import annotations

import base64
import os
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from testbed.ports import LOOPBACK, accepts, reserve_port
from testbed.processes import Process, ServiceError, find_program, tail

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION = "4.3.1"

# A test broker lives for minutes: the first-tier compiler and the serial collector start faster and cost
# less memory than those that pay off after hours.
JVM_OPTIONS = (
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
)

PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller_port}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller_port}{more_listeners}
advertised.listeners=PLAINTEXT://{host}:{port}{more_listeners}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_SSL:SASL_SSL,SSL:SSL
log.dirs={data}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
broker.heartbeat.interval.ms=500
broker.session.timeout.ms=3000
auto.create.topics.enable=false
"""

GUARDED = """\
ssl.keystore.type=PEM
ssl.keystore.location={keystore}
ssl.truststore.type=PEM
ssl.truststore.location={authority}
listener.name.ssl.ssl.client.auth=required
ssl.principal.mapping.rules=RULE:^CN=(.*?)$/$1/
sasl.enabled.mechanisms=SCRAM-SHA-512,PLAIN
listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.sasl_ssl.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required {plain};
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
"""
"""What only its users may do who are allowed to; who comes by the plain listener, and the broker itself, may do all."""


@dataclass(frozen=True)
class Guard:
    """Two listeners more, by TLS: one asks for a login (SCRAM-SHA-512 or PLAIN), one for a certificate of the authority's.

    What a user may do stands in Kafka's ACLs, and nobody may do anything else.

    Attributes:
        authority: the file of its certificate.
        certificate: the broker's own, with its key.
        users: their passwords.
    """

    authority: Path
    certificate: Path
    key: Path
    users: Mapping[str, str]


class Kafka:
    """An Apache Kafka broker on loopback; `bootstrap_servers` stays the same over restarts.

    Args:
        directory: where its configuration, data and log are; made when missing.
        topics: topics that are made at the first start, with their numbers of partitions.
        guard: what else listens, at `sasl_servers` and `ssl_servers`; by default nothing does.
    """

    def __init__(
        self, directory: Path, topics: Mapping[str, int] | None = None, guard: Guard | None = None
    ) -> None:
        self.directory = directory
        self._topics = dict(topics or {})
        self.port = reserve_port()
        self.bootstrap_servers = f"{LOOPBACK}:{self.port}"
        self._guard = guard
        if guard is not None:
            self.sasl_servers = f"{LOOPBACK}:{reserve_port()}"
            self.ssl_servers = f"{LOOPBACK}:{reserve_port()}"
        self.log = directory / "kafka.log"
        self._properties = directory / "server.properties"
        self._process = Process(
            "Kafka", [*_java(), "kafka.Kafka", str(self._properties)], log=self.log
        )

    @property
    def running(self) -> bool:
        """Whether the broker's process runs."""
        return self._process.running

    def start(self) -> None:
        """Start the broker, on the data it had before if there is any; returns when it answers.

        Raises:
            ServiceError: it does not start; with the end of its log.
        """
        fresh = not self._properties.exists()
        if fresh:
            self._format()
        self._process.start(self._answers, timeout=120)
        if fresh:
            for name, partitions in self._topics.items():
                self.create_topic(name, partitions)

    def stop(self) -> None:
        """Stop the broker in order; its data stay."""
        self._process.stop()

    def kill(self) -> None:
        """Kill the broker (SIGKILL); its data stay."""
        self._process.kill()

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic; returns when it can be used.

        Raises:
            KafkaException: the broker refuses it, such as one that exists.
        """
        topic = NewTopic(name, partitions, 1, config=dict(config or {}))
        admin = self._admin()
        admin.create_topics([topic])[name].result(timeout=60)

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})

    def _answers(self) -> bool:
        if not accepts(self.port):
            return False
        try:
            return bool(self._admin().list_topics(timeout=5).brokers)
        except KafkaException:
            return False

    def _format(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        draft = self._properties.with_suffix(".draft")
        draft.write_text(
            PROPERTIES.format(
                host=LOOPBACK,
                port=self.port,
                controller_port=reserve_port(),
                data=self.directory / "data",
                more_listeners=""
                if self._guard is None
                else f",SASL_SSL://{self.sasl_servers},SSL://{self.ssl_servers}",
            )
            + ("" if self._guard is None else self._guarded(self._guard))
        )
        # One that begins with "-" would be taken for an option; Kafka itself makes none either.
        cluster_id = base64.urlsafe_b64encode(b"\0" + uuid.uuid4().bytes[1:]).rstrip(b"=").decode()
        formatting = [
            *_java(),
            "kafka.tools.StorageTool",
            "format",
            "-t",
            cluster_id,
            "-c",
            str(draft),
        ]
        if self._guard is not None:
            for user, password in self._guard.users.items():
                formatting += ["--add-scram", f"SCRAM-SHA-512=[name={user},password={password}]"]
        with self.log.open("ab") as log:
            if subprocess.run(formatting, stdout=log, stderr=log, check=False).returncode:
                raise ServiceError(f"Kafka: format failed; {self.log}:\n{tail(self.log)}")
        draft.rename(self._properties)

    def _guarded(self, guard: Guard) -> str:
        keystore = self.directory / "keystore.pem"
        keystore.write_text(guard.key.read_text() + guard.certificate.read_text())
        plain = " ".join(f'user_{user}="{password}"' for user, password in guard.users.items())
        return GUARDED.format(keystore=keystore, authority=guard.authority, plain=plain)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _java() -> list[str]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    libs = cache / "fairpost" / f"kafka-{VERSION}"
    if not libs.is_dir():
        raise ServiceError(f"Kafka's jars are not in {libs}; run testbed/setup.sh")
    return [find_program("java"), *JVM_OPTIONS, "-cp", f"{libs}/*"]
