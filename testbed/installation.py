"""An installation of fairpost on a testbed: its database, topics and processes, made and run by its own commands."""

from __future__ import annotations

import itertools
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg import sql

from testbed.ports import LOOPBACK, accepts, reserve_port
from testbed.processes import Process, ServiceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from testbed.fleet import Instance, Testbed

WORKER_ROLE = "worker"
AGENT_ROLE = "agent"
_ROLES = {WORKER_ROLE: "fairpost_processor", AGENT_ROLE: "fairpost_agent"}

FEED_CONNECTIONS = 5
"""maxproc of the feed service in deploy/postfix/master.cf."""


@dataclass(frozen=True)
class OperatorRule:
    """A mailbox operator as `operators.toml` names it; `per_minute` None is no limit."""

    name: str
    domains: Sequence[str] = ()
    per_minute: int | None = None


class Installation:
    """fairpost on a testbed; a context manager that stops every process it started and drops its database.

    Args:
        testbed: the services; Kafka and PostgreSQL must run.
        name: of its database; also the prefix of its topics where `prefix` is None.
        operators: what is applied as `operators.toml`.
        prefix: of its topics.
        partitions: of the topics that workers share out.
        template: a migrated database to start from; None: an empty one is migrated.
    """

    def __init__(
        self,
        testbed: Testbed,
        name: str,
        operators: Sequence[OperatorRule],
        *,
        prefix: str | None = None,
        partitions: int = 4,
        template: str | None = None,
    ) -> None:
        self.name = name
        self.prefix = f"{name}." if prefix is None else prefix
        self.directory = testbed.directory / f"fairpost-{name}"
        self._testbed = testbed
        self._operators = operators
        self._partitions = partitions
        self._template = template
        self._stack = ExitStack()
        self._numbers = itertools.count(1)

    def topic(self, name: str) -> str:
        """The full name of a topic."""
        return self.prefix + name

    def start(self) -> None:
        """Create database and topics, and apply the operators.

        Raises:
            ServiceError: a command failed; with what it said.
        """
        self.directory.mkdir(mode=0o755)
        (self.directory / "machine-id").write_text("0123456789abcdef0123456789abcdef\n")
        self._testbed.postgres.create_database(self.name, self._template)
        self._stack.callback(self._testbed.postgres.drop_database, self.name)
        if self._template is None:
            self.migrate()
        create_roles(self._testbed.postgres.dsn(self.name))
        partitions = str(self._partitions)
        self.fairpost("topics", "create", "--replication", "1", "--partitions", partitions)
        self.apply_operators(self._operators)

    def stop(self) -> None:
        """Stop every process and drop the database."""
        self._stack.close()

    def migrate(self) -> None:
        """Bring the database up to date, as its owner.

        Raises:
            ServiceError: it failed; with what was said.
        """
        self.fairpost("migrate", "--database", self._testbed.postgres.dsn(self.name))

    def apply_operators(self, operators: Sequence[OperatorRule]) -> None:
        """Apply an `operators.toml` of these.

        Raises:
            ServiceError: it is refused; with what was said.
        """
        path = self.directory / "operators.toml"
        path.write_text("".join(map(_operator_toml, operators)))
        self.fairpost("operators", "apply", str(path))

    @property
    def environment(self) -> dict[str, str]:
        """The settings of the processor."""
        return {
            "FAIRPOST_DATABASE": self._testbed.postgres.dsn(self.name, WORKER_ROLE),
            "FAIRPOST_KAFKA_BOOTSTRAP_SERVERS": self._testbed.kafka.bootstrap_servers,
            "FAIRPOST_TOPIC_PREFIX": self.prefix,
        }

    def agent_environment(self, instance: Instance) -> dict[str, str]:
        """The settings of an instance's agent."""
        return {
            "FAIRPOST_INSTANCE": instance.name,
            "FAIRPOST_DATABASE": self._testbed.postgres.dsn(self.name, AGENT_ROLE),
            "FAIRPOST_BOUNCE_DOMAIN": instance.postfix.bounce_domain,
            "FAIRPOST_FEED_PORT": str(instance.feed_port),
            "FAIRPOST_FEED_CONNECTIONS": str(FEED_CONNECTIONS),
            "FAIRPOST_POSTFIX_CONFIG_DIRECTORY": str(instance.postfix.config_directory),
            "FAIRPOST_LOCK_DIRECTORY": str(self.directory),
            "FAIRPOST_MACHINE_ID_FILE": str(self.directory / "machine-id"),
            # Where the instance has no Fluentd, nobody listens.
            "FAIRPOST_FLUENTD_PORT": str(
                instance.fluentd_port if instance.fluentd else reserve_port()
            ),
        }

    def fairpost(
        self, *arguments: str, stdin: bytes = b"", check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the processor's; its output is text.

        Raises:
            ServiceError: it failed, and `check` is true.
        """
        return run_command("fairpost", arguments, self.environment, stdin=stdin, check=check)

    def fairpost_agent(
        self, instance: Instance, *arguments: str, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of an instance's agent.

        Raises:
            ServiceError: it failed, and `check` is true.
        """
        return run_command(
            "fairpost-agent", arguments, self.agent_environment(instance), check=check
        )

    def start_worker(self, **settings: str) -> Running:
        """Start a worker; settings are environment variables in addition."""
        return self._run(
            "worker", "fairpost", "worker", "WORKER_METRICS_PORT", self.environment | settings
        )

    def start_tracker(self, **settings: str) -> Running:
        """Start a tracker."""
        return self._run(
            "tracker", "fairpost", "tracker", "TRACKER_METRICS_PORT", self.environment | settings
        )

    def start_agent(self, instance: Instance, **settings: str) -> Running:
        """Start the agent of an instance."""
        environment = self.agent_environment(instance) | settings
        return self._run(
            f"agent-{instance.name}", "fairpost-agent", "run", "METRICS_PORT", environment
        )

    def connect(self) -> psycopg.Connection[Any]:
        """A connection as the database's owner, in autocommit, for looking at everything."""
        return psycopg.connect(
            self._testbed.postgres.dsn(self.name),
            autocommit=True,
            options="-c search_path=fairpost,public",
        )

    def _run(
        self, name: str, program: str, command: str, port: str, environment: Mapping[str, str]
    ) -> Running:
        metrics_port = reserve_port()
        log = self.directory / f"{name}-{next(self._numbers)}.log"
        process = Process(
            name,
            [_program(program), command],
            log=log,
            environment={**environment, f"FAIRPOST_{port}": str(metrics_port)},
        )
        self._stack.callback(process.stop)
        process.start(lambda: accepts(metrics_port))
        return Running(process, metrics_port)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self.stop)
            self.start()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@dataclass(frozen=True)
class Running:
    """A process of the installation, and where its metrics are."""

    process: Process
    metrics_port: int
    address: str = field(default=LOOPBACK)

    @property
    def log(self) -> Path:
        """Its standard error."""
        return self.process.log

    def stop(self) -> None:
        """SIGTERM, and wait."""
        self.process.stop()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()


def create_roles(dsn: str) -> None:
    """Create the login roles `worker` and `agent` in a cluster that has none; any database of it will do."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for role, group in _ROLES.items():
            known = connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (role,))
            if known.fetchone() is None:
                connection.execute(
                    sql.SQL("CREATE ROLE {} LOGIN IN ROLE {}").format(
                        sql.Identifier(role), sql.Identifier(group)
                    )
                )


def run_command(
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: bytes = b"",
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a command of fairpost's with these settings and no others of the kind.

    Raises:
        ServiceError: it failed, and `check` is true.
    """
    done = subprocess.run(
        [_program(program), *arguments],
        input=stdin.decode(),
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C.UTF-8", **environment},
        check=False,
    )
    if check and done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ServiceError(f"{program} {' '.join(arguments)}: exit code {done.returncode}: {said}")
    return done


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _operator_toml(operator: OperatorRule) -> str:
    lines = ["[[operator]]", f'name = "{operator.name}"']
    if operator.domains:
        domains = ", ".join(f'"{domain}"' for domain in operator.domains)
        lines.append(f"domains = [{domains}]")
    if operator.per_minute is not None:
        lines.append(f"per_minute = {operator.per_minute}")
    return "\n".join(lines) + "\n\n"
