"""All services together: Kafka, PostgreSQL, mailbox operators, and instances of Postfix with their Fluentd."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from testbed.fluentd import Fluentd
from testbed.kafka import Kafka
from testbed.mailbox import Mailboxes, MailboxOperator
from testbed.opendkim import OpenDkim
from testbed.postfix import Postfix
from testbed.postgres import Postgres
from testbed.processes import ServiceError
from testbed.runs import Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

T = TypeVar("T")

OPERATORS: Mapping[str, Sequence[str]] = {
    "gmail": ("gmail.test", "googlemail.test"),
    "outlook": ("outlook.test", "hotmail.test"),
    "yahoo": ("yahoo.test",),
    "other": ("example.test", "example.org"),
}
"""Mailbox operators and their domains, where a testbed is not given its own."""

INSTANCES: Sequence[str] = ("postfix-a", "postfix-b")

DELIVERY_LOG = "delivery-log"

DELIVERY_LOG_PARTITIONS = 4


class Service(Protocol):
    """What is started and stopped."""

    def start(self) -> None:
        """Start it; returns when it is ready."""

    def stop(self) -> None:
        """Stop it; harmless when it does not run."""


@dataclass(frozen=True)
class Instance:
    """A Postfix instance, the Fluentd that ships its log, and the OpenDKIM that signs its mail.

    `fluentd` is None where there is no Kafka, `opendkim` where no domain is to be signed.
    """

    name: str
    postfix: Postfix
    fluentd: Fluentd | None
    opendkim: OpenDkim | None = None

    @property
    def feed_port(self) -> int:
        """The port of Postfix's feed."""
        return self.postfix.feed_port

    @property
    def fluentd_port(self) -> int:
        """The port that takes the agent's records.

        Raises:
            ServiceError: there is no Fluentd, as there is no Kafka.
        """
        return _started(self.fluentd, f"the Fluentd of {self.name}").port

    @property
    def log(self) -> Path:
        """Postfix's log."""
        return self.postfix.log

    def start(self) -> None:
        """Start all."""
        if self.opendkim is not None:
            self.opendkim.start()
        self.postfix.start()
        if self.fluentd is not None:
            self.fluentd.start()

    def stop(self) -> None:
        """Stop all."""
        self.postfix.stop()
        if self.opendkim is not None:
            self.opendkim.stop()
        if self.fluentd is not None:
            self.fluentd.stop()


class Testbed:
    """Real services on loopback, started together and stopped together; a context manager.

    What it starts ends with this process, however that ends. The topic `delivery-log` is made when there
    are instances and Kafka.

    Args:
        kafka: whether to start Kafka.
        postgres: whether to start PostgreSQL.
        instances: the names of the Postfix instances, each with a Fluentd where there is Kafka.
        operators: the domains of each mailbox operator, by its name.
        postfix: main.cf parameters of all instances.
        signed: the From domains that the instances named here have DKIM keys for; none: they do not sign.
        fsync: False trades PostgreSQL's durability for speed.
        keep: leave the folder of the run behind.
    """

    __test__ = False  # its name is no test's

    def __init__(
        self,
        *,
        kafka: bool = True,
        postgres: bool = True,
        instances: Sequence[str] = INSTANCES,
        operators: Mapping[str, Sequence[str]] = OPERATORS,
        postfix: Mapping[str, str] | None = None,
        signed: Sequence[str] = (),
        fsync: bool = True,
        keep: bool = False,
    ) -> None:
        self.operators: dict[str, MailboxOperator] = {}
        """The mailbox operators that the constructor named, by name."""
        self.instances: dict[str, Instance] = {}
        """All instances that run, by name."""
        self._wants_kafka = kafka
        self._wants_postgres = postgres
        self._wanted_instances = tuple(instances)
        self._wanted_operators = operators
        self._postfix_parameters = dict(postfix or {})
        self._signed = tuple(signed)
        self._fsync = fsync
        self._keep = keep
        self._mailboxes = 0
        self._kafka: Kafka | None = None
        self._postgres: Postgres | None = None
        self._run: Run | None = None
        self._directory: Path | None = None
        self._stack = ExitStack()

    @property
    def directory(self) -> Path:
        """The folder of the run: every service's files, open to all users, removed at the end."""
        return _started(self._directory, "the folder")

    @property
    def kafka(self) -> Kafka:
        """The broker."""
        return _started(self._kafka, "Kafka")

    @property
    def postgres(self) -> Postgres:
        """The database server."""
        return _started(self._postgres, "PostgreSQL")

    def start(self) -> None:
        """Start all services; returns when all are ready.

        Raises:
            ServiceError: one did not start; the others are stopped.
        """
        with ExitStack() as stack:
            self._run = stack.enter_context(Run(keep=self._keep))
            self._directory = self._run.directory
            topics = {DELIVERY_LOG: DELIVERY_LOG_PARTITIONS} if self._wanted_instances else {}
            services: list[Service] = []
            if self._wants_kafka:
                self._kafka = Kafka(self.directory / "kafka", topics)
                services.append(self._kafka)
            if self._wants_postgres:
                self._postgres = Postgres(self.directory / "postgres", fsync=self._fsync)
                services.append(self._postgres)
            if self._wanted_operators:
                mailboxes = self._new_mailboxes(self._wanted_operators)
                self.operators = mailboxes.operators
                services.append(mailboxes)
            instances = [
                self._new_instance(name, self.operators.values(), DELIVERY_LOG, {}, self._signed)
                for name in self._wanted_instances
            ]
            services.extend(instances)
            for service in services:
                stack.callback(service.stop)
            start_together(services)
            self.instances = {instance.name: instance for instance in instances}
            self._stack = stack.pop_all()

    def stop(self) -> None:
        """Stop all services and remove the folder of the run."""
        self._stack.close()
        self.instances = {}

    def keep(self) -> None:
        """Leave the folder of the run behind, for a look at what went wrong."""
        _started(self._run, "the folder").keep()

    def add_operators(
        self,
        operators: Mapping[str, Sequence[str]],
        *,
        keep_messages: bool = False,
        tls: bool = False,
    ) -> dict[str, MailboxOperator]:
        """Start mailbox operators of your own, next to the testbed's; returns them by name.

        Args:
            operators: the domains of each, by its name.
            keep_messages: whether attempts hold the messages.
            tls: whether they offer STARTTLS.

        Raises:
            ServiceError: they do not start.
        """
        mailboxes = self._new_mailboxes(operators, keep_messages=keep_messages, tls=tls)
        self._stack.callback(mailboxes.stop)
        mailboxes.start()
        return mailboxes.operators

    def add_instance(
        self,
        name: str,
        *,
        operators: Iterable[MailboxOperator] | None = None,
        topic: str = DELIVERY_LOG,
        postfix: Mapping[str, str] | None = None,
        signed: Sequence[str] = (),
    ) -> Instance:
        """Start another instance; it is stopped with the testbed, or by `remove_instance`.

        Args:
            name: a name that no other instance has.
            operators: the mailbox operators it delivers to; by default the testbed's.
            topic: the topic that its Fluentd writes to.
            postfix: main.cf parameters, before those of the testbed.
            signed: the From domains that it has DKIM keys for; none: it does not sign.

        Raises:
            ServiceError: the name is taken, or it does not start.
        """
        if (self.directory / name).exists():
            raise ServiceError(f"testbed: there is or was a {name} already; choose another name")
        if operators is None:
            operators = self.operators.values()
        instance = self._new_instance(name, operators, topic, postfix or {}, signed)
        self._stack.callback(instance.stop)
        instance.start()
        self.instances[name] = instance
        return instance

    def remove_instance(self, name: str) -> None:
        """Stop an instance and forget it; its files stay until the end of the run."""
        self.instances.pop(name).stop()

    def _new_mailboxes(
        self,
        operators: Mapping[str, Sequence[str]],
        *,
        keep_messages: bool = False,
        tls: bool = False,
    ) -> Mailboxes:
        self._mailboxes += 1
        directory = self.directory / f"operators-{self._mailboxes}"
        return Mailboxes(directory, operators, keep_messages=keep_messages, tls=tls)

    def _new_instance(
        self,
        name: str,
        operators: Iterable[MailboxOperator],
        topic: str,
        parameters: Mapping[str, str],
        signed: Sequence[str],
    ) -> Instance:
        directory = self.directory / name
        opendkim = OpenDkim(name, directory / "dkim", signed) if signed else None
        postfix = Postfix(
            name,
            directory,
            operators,
            {**self._postfix_parameters, **parameters},
            milter=opendkim.milter if opendkim else "",
        )
        fluentd = None
        if self._kafka is not None:
            fluentd = Fluentd(
                name,
                directory / "fluentd",
                postfix_log=postfix.log,
                bootstrap_servers=self._kafka.bootstrap_servers,
                topic=topic,
            )
        return Instance(name, postfix, fluentd, opendkim)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_together(services: Sequence[Service]) -> None:
    """Start services at the same time; returns when all are ready.

    Raises:
        ServiceError: one did not start, after the others did or did not.
    """
    if not services:
        return
    with ThreadPoolExecutor(max_workers=len(services)) as pool:
        starting = [pool.submit(service.start) for service in services]
    for start in starting:
        start.result()


def _started(service: T | None, name: str) -> T:
    if service is None:
        raise ServiceError(f"testbed: {name} is not part of this testbed, or it is not started")
    return service
