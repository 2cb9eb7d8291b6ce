"""`fairpost-agent postfix-config` on a real Postfix: it makes the operators' transports, and touches nothing else."""

import asyncio
import itertools
import json
import os
import smtplib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from contract.database import conninfo
from contract.operators import OTHER, Operator
from processor.operators import apply_operators
from smtp_agent.postfix import feed_processes
from smtp_agent.postfix_config import apply_changes, compare, read_operators
from testbed import Testbed
from testbed.installation import run_command
from testbed.mailbox import MailboxOperator
from testbed.ports import LOOPBACK, reserve_port
from testbed.postfix import Postfix
from testbed.processes import as_user, wait_until
from tests.conftest import Database

PATIENCE = 60
NOBODY = 65534

_numbers = itertools.count(1)


class Host:
    """A Postfix as deploy/postfix makes it, without any transport, and the settings of its agent."""

    def __init__(self, postfix: Postfix, database: Database, directory: Path) -> None:
        self.postfix = postfix
        self.etc = postfix.config_directory
        self._database = database
        self.environment = {
            "FAIRPOST_INSTANCE": postfix.name,
            "FAIRPOST_DATABASE": database.agent,
            "FAIRPOST_BOUNCE_DOMAIN": postfix.bounce_domain,
            "FAIRPOST_FEED_PORT": str(postfix.feed_port),
            "FAIRPOST_POSTFIX_CONFIG_DIRECTORY": str(self.etc),
            "FAIRPOST_LOCK_DIRECTORY": str(directory),
        }

    def postfix_config(
        self, *options: str, check: bool = True, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs the command."""
        self.age()
        environment = self.environment | settings
        return run_command("fairpost-agent", ["postfix-config", *options], environment, check=check)

    def age(self) -> None:
        """Makes the files look old: Postfix's programs wait for seconds when they are new."""
        for file in self.etc.iterdir():
            os.utime(file, (1, 1))

    def apply_operators(self, *operators: Operator) -> None:
        """Applies an `operators.toml` of these, and `other`."""

        async def apply() -> None:
            dsn = conninfo(self._database.worker, "test")
            async with await AsyncConnection.connect(dsn, autocommit=True) as connection:
                await apply_operators(connection, [*operators, Operator(OTHER)], "test", "a test")

        asyncio.run(apply())

    def files(self) -> dict[str, str]:
        """Postfix's configuration, file by file."""
        return {
            name: (self.etc / name).read_text() for name in ("main.cf", "master.cf", "operators")
        }

    def postconf(self, *arguments: str) -> str:
        """Asks Postfix what its configuration is, or changes it."""
        return subprocess.check_output(["postconf", "-c", self.etc, *arguments], text=True)

    def feed(self, *recipients: str) -> None:
        """Gives Postfix a message for each."""
        with smtplib.SMTP(LOOPBACK, self.postfix.feed_port, timeout=PATIENCE) as session:
            for recipient in recipients:
                session.sendmail("bounce+1@bounces.test", recipient, "Subject: Hi\r\n\r\nHello\r\n")


@pytest.fixture
def host(testbed: Testbed, database: Database, tmp_path: Path) -> Iterator[Host]:
    """A running Postfix of this test's own."""
    name = f"postfix-transports-{next(_numbers)}"
    # tmp_path is closed to Postfix's user.
    with Postfix(name, testbed.directory / name) as postfix:
        yield Host(postfix, database, tmp_path)


@pytest.fixture(scope="module")
def mailboxes(testbed: Testbed) -> dict[str, MailboxOperator]:
    """Two mailbox operators; their domains are what a test says."""
    return testbed.add_operators({"one": ["one.test"], "two": ["two.test"]})


def towards(mailbox: MailboxOperator, limit: int | None, *domains: str) -> Operator:
    """An operator whose mail goes to that server."""
    nexthop = f"[{LOOPBACK}]:{mailbox.port}"
    domains = domains or mailbox.domains
    return Operator(mailbox.name, domains, limit, transport={"nexthop": nexthop})


def gaps(mailbox: MailboxOperator, after: int, step: int) -> Sequence[float]:
    """Seconds from each message that was taken to the one `step` later, from a count on."""
    times = [attempt.time for attempt in mailbox.accepted()[after:]]
    return [later - earlier for earlier, later in zip(times, times[step:], strict=False)]


# ------------------------------------------------------------------ made, and at work


def test_a_host_gets_its_transports(host: Host, mailboxes: dict[str, MailboxOperator]) -> None:
    """Shown first, then made; Postfix has nothing against it and delivers; a second run has nothing to do."""
    host.apply_operators(
        towards(mailboxes["one"], 350, "one.test", "uno.test"),
        Operator("gmail", ("gmail.com", "googlemail.com"), 6),
    )
    before = host.files()
    shown = host.postfix_config()
    assert host.files() == before
    assert shown.stderr == f"{host.etc}: 14 changes; --apply makes them\n"
    lines = shown.stdout.splitlines()
    assert [line for line in lines if line[:2] not in ("+ ", "- ")] == [
        "master.cf",
        "main.cf",
        "operators",
    ]
    assert "+ one_destination_concurrency_limit = 12" in lines
    assert "+ gmail_transport_rate_delay = 7s" in lines
    assert "+ * other:" in lines
    assert "+ gmail.com gmail:" in lines
    assert not [line for line in lines if line.startswith("- ")]

    made = host.postfix_config("--apply", "--reload")
    assert made.stdout == shown.stdout
    assert made.stderr.splitlines() == [
        f"{host.etc}: 14 changes made",
        f"{host.etc}: Postfix reloaded",
    ]
    assert host.postconf("-h", "one_destination_concurrency_limit") == "12\n"
    assert host.postconf("-hF", "one/unix/process_limit") == "12\n"

    check = subprocess.run(
        ["postfix", "-c", host.etc, "check"], capture_output=True, text=True, check=True
    )
    assert check.stdout + check.stderr == ""
    warned = subprocess.run(
        ["postconf", "-c", host.etc, "-n"], capture_output=True, text=True, check=True
    )
    assert warned.stderr == ""

    host.feed("ann@one.test", "bob@uno.test")
    mailboxes["one"].wait_for(lambda attempt: attempt.accepted, count=2)
    wait_until(
        lambda: host.postfix.log.read_text().count("status=sent") == 2,
        timeout=PATIENCE,
        what="two deliveries in the log",
    )
    assert f"{host.postfix.tag}/one/smtp[" in host.postfix.log.read_text()

    after = host.files()
    again = host.postfix_config("--apply")
    assert (again.stdout, again.stderr) == ("", f"{host.etc}: nothing to change\n")
    assert host.files() == after


def test_the_service_bounds_an_operator_over_all_its_domains(
    host: Host, mailboxes: dict[str, MailboxOperator]
) -> None:
    """With a limit of 60 two deliveries run at once and never three, though it has three domains."""
    domains = ("two.test", "due.test", "deux.test")
    host.apply_operators(towards(mailboxes["two"], 60, *domains))
    host.postfix_config("--apply", "--reload")
    mailbox = mailboxes["two"]
    mailbox.set_delay(0.5)
    before = len(mailbox.accepted())
    host.feed(*(f"u{n}@{domains[n % 3]}" for n in range(9)))
    mailbox.wait_for(lambda attempt: attempt.accepted, count=before + 9)
    mailbox.set_delay(0)
    # A process answers one message in half a second, two of them three in more than that.
    assert min(gaps(mailbox, before, 2)) > 0.49
    assert min(gaps(mailbox, before, 1)) < 0.49


def test_a_rate_delay_bounds_an_operator_that_answers_at_once(
    host: Host, mailboxes: dict[str, MailboxOperator]
) -> None:
    """With a limit of 15 a second lies between any two deliveries, though it has two domains."""
    host.apply_operators(towards(mailboxes["one"], 15, "one.test", "uno.test"))
    host.postfix_config("--apply", "--reload")
    mailbox = mailboxes["one"]
    before = len(mailbox.accepted())
    host.feed("a@one.test", "b@uno.test", "c@one.test", "d@uno.test")
    mailbox.wait_for(lambda attempt: attempt.accepted, count=before + 4)
    assert min(gaps(mailbox, before, 1)) > 0.9


# ------------------------------------------------------------------ what is a person's


MINE = {
    "smtp_destination_rate_delay": "0s",
    "mine_destination_concurrency_limit": "3",
    "copied_destination_concurrency_limit": "3",
}


def test_what_is_a_persons_stays(host: Host) -> None:
    """Services, parameters and comments that are not fairpost's stay as they are; an operator that goes takes its own along."""
    host.postconf(
        "-M",
        "mine/unix=mine unix - - n - 3 smtp -o syslog_name=postfix/mine",
        "copied/unix=copied unix - - n - 3 smtp -o fairpost_operator=gmail",
    )
    host.postconf("-e", *(f"{name}={value}" for name, value in MINE.items()))
    original = host.files()
    host.apply_operators(
        Operator("gmail", ("gmail.com",), 15), Operator("web_de", ("web.de",), None)
    )
    host.postfix_config("--apply")
    assert host.postconf("-hF", "gmail/unix/process_limit") == "2\n"
    host.apply_operators(Operator("web_de", ("web.de",), None))
    gone = host.postfix_config("--apply")
    assert [line.split()[1] for line in gone.stdout.splitlines() if line.startswith("-")] == [
        "gmail",
        "gmail_destination_concurrency_limit",
        "gmail_destination_recipient_limit",
        "gmail_transport_rate_delay",
        "gmail.com",
    ]
    assert "gmail" not in (host.etc / "operators").read_text()
    for name in ("main.cf", "master.cf"):
        text = (host.etc / name).read_text()
        ours = {line for line in text.splitlines() if line not in original[name].splitlines()}
        assert {line.split()[0] for line in ours if line.split()} == (
            {"other_destination_recipient_limit", "web_de_destination_recipient_limit"}
            if name == "main.cf"
            else {"other", "web_de", "-o"}
        )
        assert "gmail" not in "".join(ours)
        assert set(original[name].splitlines()) <= set(text.splitlines())


def test_an_edit_is_shown_and_overwritten_only_with_apply(host: Host) -> None:
    """What a person did to a generated transport stands until --apply, and is shown before."""
    host.apply_operators(Operator("gmail", ("gmail.com",), 350))
    host.postfix_config("--apply")
    right = host.files()
    host.postconf("-F", "gmail/unix/process_limit=99")
    host.postconf("-e", "gmail_destination_concurrency_limit=99", "gmail_destination_rate_delay=1s")
    with (host.etc / "operators").open("a") as table:
        table.write("gmail.example gmail:\n")
    edited = host.files()
    shown = json.loads(host.postfix_config("--json").stdout)
    assert host.files() == edited
    found = [(c["file"], c["name"], c["before"], c["after"]) for c in shown[1:]]
    assert found == [
        ("main.cf", "gmail_destination_concurrency_limit", "99", "12"),
        ("main.cf", "gmail_destination_rate_delay", "1s", None),
        ("operators", "gmail.example", "gmail:", None),
    ]
    assert shown[0]["name"] == "gmail"
    assert " 99 smtp " in shown[0]["before"]
    assert " 12 smtp " in shown[0]["after"]
    host.postfix_config("--apply")
    assert host.files()["operators"] == right["operators"]
    assert host.postfix_config("--json").stdout == "[]\n"


def test_killed_in_between_it_goes_on(host: Host, database: Database) -> None:
    """After any number of its changes the rest is what a second run makes."""
    host.apply_operators(Operator("gmail", ("gmail.com",), 15))
    operators = read_operators(database.agent)
    changes = compare(host.etc, operators)
    for number in range(1, len(changes)):
        apply_changes(host.etc, changes[:number][-1:])
        host.age()
        assert compare(host.etc, operators) == changes[number:]


# ------------------------------------------------------------------ refusals


def test_a_service_of_that_name_is_a_persons(host: Host) -> None:
    """An operator whose name is taken changes nothing, and is told what to do."""
    host.postconf("-M", "gmail/unix=gmail unix - - n - 20 smtp")
    host.apply_operators(Operator("gmail", ("gmail.com",), 350))
    before = host.files()
    refused = host.postfix_config("--apply", check=False)
    assert refused.returncode == 1
    assert refused.stderr == (
        f"operator 'gmail': {host.etc}/master.cf has a service gmail that is not fairpost's;"
        " remove that service, or rename the operator\n"
    )
    assert host.files() == before


_NO_NAME = r"Expected `str` matching regex '\\A[a-z][a-z0-9_]{0,62}\\Z' - at `$.name`"
_A_SERVICE = "\nx unix - n n - - pipe user=nobody argv=/bin/true"


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        (
            Operator("gmail", ("gmail.com",), transport={"smtp_helo_timeout": "1\nx"}),
            r"operator 'gmail': transport.smtp_helo_timeout: not '1\nx'",
        ),
        (
            Operator("gmail", ("gmail.com",), transport={"maxproc": f"5{_A_SERVICE}"}),
            rf"operator 'gmail': transport.maxproc: not {f'5{_A_SERVICE}'!r}",
        ),
        (
            Operator("gmail\n", ("gmail.com",)),
            rf"operator 'gmail\n': {_NO_NAME}",
        ),
        (
            Operator(f"gmail{_A_SERVICE}", ("gmail.com",)),
            f"operator {f'gmail{_A_SERVICE}'!r}: {_NO_NAME}",
        ),
        (
            Operator("gmail", ("gmail.com smtp:\nother.test",)),
            r"operator 'gmail': 'gmail.com smtp:\nother.test' is no mail domain",
        ),
    ],
    ids=["setting", "maxproc", "line end", "name", "domain"],
)
def test_root_takes_no_word_of_the_database(host: Host, operator: Operator, said: str) -> None:
    """What came into the database unchecked is refused before it can become a service of root's or another's route."""
    host.apply_operators(operator)
    before = host.files()
    refused = host.postfix_config("--apply", check=False)
    assert (refused.returncode, refused.stderr) == (1, f"{said}\n")
    assert host.files() == before


def break_table(host: Host) -> dict[str, str]:
    """Leaves the table out of main.cf."""
    host.postconf("-e", "transport_maps=")
    return {}


@pytest.mark.parametrize(
    ("options", "breaking", "code", "said"),
    [
        (["--reload"], lambda _: {}, 2, "--reload goes with --apply"),
        ([], break_table, 1, "main.cf: transport_maps does not name texthash:"),
        (
            [],
            lambda _: {"FAIRPOST_POSTFIX_CONFIG_DIRECTORY": "/nowhere"},
            1,
            "postconf: fatal: open /nowhere/",
        ),
        (
            [],
            lambda _: {"FAIRPOST_DATABASE": f"host={LOOPBACK} port={reserve_port()}"},
            1,
            "Connection refused",
        ),
        ([], lambda _: {"FAIRPOST_FEED_PORT": "none"}, 2, "feed_port"),
    ],
)
def test_what_goes_wrong_is_one_line(
    host: Host,
    options: list[str],
    breaking: Callable[[Host], dict[str, str]],
    code: int,
    said: str,
) -> None:
    """Wrong usage and configuration end with 2, what fails with 1; it says where."""
    failed = host.postfix_config(*options, check=False, **breaking(host))
    assert failed.returncode == code
    assert said in failed.stderr.splitlines()[-1]
    assert failed.stdout == ""


def test_only_root_can_apply(host: Host) -> None:
    """An unprivileged user, as the agent is, sees what would change, and cannot change it."""
    host.apply_operators(Operator("gmail", ("gmail.com",), 350))
    before = host.files()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LC_ALL", "C.UTF-8")
        for name, value in host.environment.items():
            patch.setenv(name, value)
        program = str(Path(sys.executable).with_name("fairpost-agent"))
        command = ["setpriv", *as_user(NOBODY), program, "postfix-config"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
        assert "+ gmail.com gmail:" in shown.stdout
        refused = subprocess.run(
            [*command, "--apply"], capture_output=True, text=True, check=False, cwd="/"
        )
    assert refused.returncode == 1
    assert "Permission denied" in refused.stderr.splitlines()[-1]
    assert host.files() == before


# ------------------------------------------------------------------ the feed's processes


@pytest.mark.parametrize(("maxproc", "number"), [("5", 5), ("17", 17), ("-", 200), ("0", 0)])
def test_processes_of_the_feed(host: Host, maxproc: str, number: int) -> None:
    """As master.cf says, or main.cf where that says nothing."""
    port = host.postfix.feed_port
    host.postconf("-F", f"{LOOPBACK}:{port}/inet/process_limit={maxproc}")
    assert feed_processes(host.etc, LOOPBACK, port) == number
    assert feed_processes(host.etc, LOOPBACK, reserve_port()) is None


def test_processes_of_a_feed_on_all_addresses(host: Host) -> None:
    """A service that names a port only is the feed too."""
    port = reserve_port()
    host.postconf("-M", f"{port}/inet={port} inet n - n - 3 smtpd")
    assert feed_processes(host.etc, LOOPBACK, port) == 3
