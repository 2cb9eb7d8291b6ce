"""The testbed: each service does what it says, and none is left behind."""

from __future__ import annotations

import itertools
import signal
import smtplib
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
import pytest
from confluent_kafka import Consumer, Producer
from fluent.sender import FluentSender

from testbed import Testbed
from testbed.fleet import OPERATORS
from testbed.postfix import DEPLOY
from testbed.processes import Process, ServiceError, find_program, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from confluent_kafka import Message

    from testbed.fleet import Instance

PROJECT = Path(__file__).parents[2]

IMPATIENT = {
    "minimal_backoff_time": "1s",
    "maximal_backoff_time": "2s",
    "queue_run_delay": "1s",
    "smtp_rcpt_timeout": "1s",
}

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def testbed() -> Iterator[Testbed]:
    """Everything, two instances of Postfix included."""
    with Testbed(postfix=IMPATIENT, fsync=False) as testbed:
        yield testbed


@pytest.fixture
def instance(testbed: Testbed) -> Instance:
    """One of the instances."""
    return testbed.instances["postfix-a"]


def feed(instance: Instance, recipient: str, sender: str = "bounce+1@bounces.test") -> str:
    """Give Postfix a message; returns its queue id."""
    with smtplib.SMTP("127.0.0.1", instance.feed_port, timeout=30) as session:
        session.ehlo()
        session.mail(sender)
        session.rcpt(recipient)
        code, reply = session.data("Subject: hello\r\nMessage-ID: <1@test>\r\n\r\nbody\r\n")
    assert code == 250
    return reply.decode().rpartition(" ")[2]


def fresh(prefix: str = "ann") -> str:
    """Return a local part that no other test uses."""
    return f"{prefix}.{next(_numbers)}"


def wait_for_line(instance: Instance, *parts: str) -> str:
    """Wait for a line of Postfix's log that holds all parts, and return it."""
    found: list[str] = []

    def logged() -> bool:
        lines = instance.log.read_text().splitlines()
        found[:] = [line for line in lines if all(part in line for part in parts)]
        return bool(found)

    wait_until(logged, timeout=60, what=f"a log line with {parts}")
    return found[0]


def consume(
    testbed: Testbed, enough: Callable[[list[Message]], bool], topic: str = "delivery-log"
) -> list[Message]:
    """Read a topic from its beginning until there is enough, and return all records."""
    consumer = Consumer(
        {
            "bootstrap.servers": testbed.kafka.bootstrap_servers,
            "group.id": f"test-{next(_numbers)}",
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }
    )
    consumer.subscribe([topic])
    records: list[Message] = []

    def read() -> bool:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            records.append(message)
        return enough(records)

    try:
        wait_until(read, timeout=60, what=f"records of {topic}")
    finally:
        consumer.close()
    return records


def value(message: Message) -> dict[str, Any]:
    """Decode a record."""
    return msgspec.json.decode(message.value() or b"", type=dict[str, Any])


def holds(text: str) -> Callable[[list[Message]], bool]:
    """Return whether any record's log line holds the text."""
    return lambda records: any(text in value(each).get("message", "") for each in records)


def test_kafka_keeps_records_over_stop_and_kill(testbed: Testbed) -> None:
    """Kafka comes back on the same port with what was produced."""
    testbed.kafka.create_topic("kept", 3)
    for number, end in enumerate((testbed.kafka.stop, testbed.kafka.kill)):
        producer = Producer({"bootstrap.servers": testbed.kafka.bootstrap_servers, "log_level": 0})
        producer.produce("kept", key="k", value=str(number))
        assert producer.flush(20) == 0
        end()
        testbed.kafka.start()
    records = consume(testbed, lambda found: len(found) >= 2, "kept")
    assert [each.value() for each in records] == [b"0", b"1"]


def test_postgres_clones_a_template(testbed: Testbed) -> None:
    """A database made from a template has the template's rows, and is gone when dropped."""
    testbed.postgres.create_database("original")
    with psycopg.connect(testbed.postgres.dsn("original")) as connection:
        connection.execute("CREATE TABLE words AS SELECT 'hello' AS word")
    testbed.postgres.create_database("copy", template="original")
    with psycopg.connect(testbed.postgres.dsn("copy")) as connection:
        assert connection.execute("SELECT word FROM words").fetchall() == [("hello",)]
        calls = "SELECT calls FROM pg_stat_statements WHERE query LIKE 'SELECT word FROM words'"
        assert connection.execute(calls).fetchall() == [(1,)]
    with psycopg.connect(testbed.postgres.dsn("copy"), autocommit=True):
        # Also while somebody is connected.
        testbed.postgres.drop_database("copy")
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(testbed.postgres.dsn("copy"))


def test_postgres_keeps_commits_over_stop_and_kill(testbed: Testbed) -> None:
    """PostgreSQL comes back on the same port with what was committed."""
    testbed.postgres.create_database("kept")
    for number, end in enumerate((testbed.postgres.stop, testbed.postgres.kill)):
        with psycopg.connect(testbed.postgres.dsn("kept")) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS numbers (number int)")
            connection.execute("INSERT INTO numbers VALUES (%s)", [number])
        end()
        testbed.postgres.start()
    with psycopg.connect(testbed.postgres.dsn("kept")) as connection:
        assert connection.execute("SELECT number FROM numbers").fetchall() == [(0,), (1,)]


def test_postfix_check_finds_nothing(instance: Instance) -> None:
    """`postfix check` accepts the configuration made of deploy's files, without a warning."""
    before = instance.log.read_text().count("postfix-script")
    check = ["postfix", "-c", str(instance.postfix.config_directory), "check"]
    done = subprocess.run(check, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
    assert instance.log.read_text().count("postfix-script") == before


def test_postfix_runs_what_deploy_holds(instance: Instance) -> None:
    """Every parameter and service of deploy/postfix is the instance's, but for paths, port and routes."""

    def postconf(directory: Path, option: str) -> set[str]:
        command = ["postconf", "-c", str(directory), option]
        return set(subprocess.check_output(command, text=True).splitlines())

    def services(directory: Path) -> set[str]:
        return {" ".join(line.split()) for line in postconf(directory, "-M")}

    own = {"config_directory", "maillog_file", "bounce_domain", "dkim_milter", *IMPATIENT}
    differing = postconf(DEPLOY, "-n") - postconf(instance.postfix.config_directory, "-n")
    assert {line.partition(" =")[0] for line in differing} <= own

    deployed = {service.replace(":2525 ", ":PORT ") for service in services(DEPLOY)}
    running = {
        service.replace(f":{instance.feed_port} ", ":PORT ")
        for service in services(instance.postfix.config_directory)
    }
    assert deployed <= running
    assert {service.partition(" ")[0] for service in running - deployed} == set(OPERATORS)


def test_accepted_mail_reaches_its_operator(testbed: Testbed, instance: Instance) -> None:
    """Mail to an operator's domain comes from the instance's own address, with sender and headers."""
    recipient = f"{fresh()}@gmail.test"
    queue_id = feed(instance, recipient, "bounce+42@bounces.test")
    [attempt] = testbed.operators["gmail"].wait_for(lambda each: each.recipient == recipient)
    assert attempt.accepted
    assert attempt.sender == "bounce+42@bounces.test"
    assert attempt.peer == instance.postfix.address
    assert attempt.headers["subject"] == "hello"
    assert attempt.headers["message-id"] == "<1@test>"
    assert abs(attempt.time - time.time()) < 30
    line = wait_for_line(instance, queue_id, "status=sent")
    assert "postfix-a/gmail/smtp[" in line
    wait_for_line(instance, f"{queue_id}: from=<bounce+42@bounces.test>", "(queue active)")


@pytest.mark.parametrize(
    ("mood", "line"),
    [
        ("defer", "dsn=4.3.0, status=deferred (host 127.0.0.1[127.0.0.1] said: 451 4.3.0"),
        ("reject", "dsn=5.1.1, status=bounced (host 127.0.0.1[127.0.0.1] said: 550 5.1.1"),
        ("full", "dsn=4.2.2, status=deferred (host 127.0.0.1[127.0.0.1] said: 452 4.2.2"),
        ("throttle", "dsn=4.7.0, status=deferred (host 127.0.0.1[127.0.0.1] said: 421 4.7.0"),
        ("silent", "dsn=4.4.2, status=deferred (conversation with 127.0.0.1[127.0.0.1] timed out"),
    ],
)
def test_recipient_asks_for_behaviour(
    testbed: Testbed, instance: Instance, mood: str, line: str
) -> None:
    """A recipient's first part gets the behaviour it names, in the log and in the records."""
    recipient = f"{fresh(mood)}@outlook.test"
    feed(instance, recipient)
    wait_for_line(instance, f"to=<{recipient}>", line)
    attempt, *_ = testbed.operators["outlook"].wait_for(lambda each: each.recipient == recipient)
    assert not attempt.accepted
    assert attempt.headers == {}


def test_grey_recipient_is_accepted_at_the_second_attempt(
    testbed: Testbed, instance: Instance
) -> None:
    """Greylisting refuses the first attempt and takes the retry."""
    recipient = f"{fresh('grey')}@yahoo.test"
    feed(instance, recipient)
    first, second = testbed.operators["yahoo"].wait_for(
        lambda each: each.recipient == recipient, count=2
    )
    assert (first.code, second.code) == (451, 250)


def test_moods_and_rates_change_while_running(testbed: Testbed) -> None:
    """An operator behaves as it is told, from the next recipient on."""
    operator = testbed.add_operators({"moody": ["moody.test"]}, keep_messages=True)["moody"]
    instance = testbed.add_instance("moody", operators=[operator])
    try:
        assert instance.postfix.tag == "postfix-moody"
        blocked = f"{fresh()}@moody.test"
        operator.set_mood("reject", "550 5.7.1 blocked, see https://block.test")
        feed(instance, blocked)
        wait_for_line(instance, f"to=<{blocked}>", "dsn=5.7.1, status=bounced", "blocked, see")

        operator.set_mood("accept")
        operator.set_rate(2)
        for _ in range(3):
            feed(instance, f"{fresh()}@moody.test")
        wait_for_line(instance, "said: 421 4.7.0", "status=deferred")
        assert len(operator.accepted()) == 2
        assert operator.accepted()[0].body == b"body\r\n"
        # What was accepted leaves the queue a moment after.
        wait_until(lambda: len(instance.postfix.queue()) == 1, timeout=60, what="one that waits")
        [waiting] = instance.postfix.queue()
        assert waiting.sender == "bounce+1@bounces.test"
        assert "421 4.7.0" in waiting.recipients[0].delay_reason

        operator.set_rate(None)
        operator.wait_for(lambda each: each.accepted, count=3)
        wait_until(lambda: instance.postfix.queue() == [], timeout=60, what="an empty queue")
    finally:
        testbed.remove_instance("moody")


def test_bounces_and_unknown_domains_stay_inside(instance: Instance) -> None:
    """Postfix's own bounces are discarded, and a domain of no operator is refused."""
    with pytest.raises(smtplib.SMTPDataError, match="no valid recipients"):
        feed(instance, f"{fresh()}@nowhere.test")
    wait_for_line(instance, "NOQUEUE: reject: RCPT", "@nowhere.test", "no route in this testbed")
    bounced = feed(instance, f"{fresh('reject')}@gmail.test")
    notification = wait_for_line(instance, bounced, "sender non-delivery notification: ")
    wait_for_line(instance, notification.rpartition(" ")[2], "discard", "status=sent")


def test_postfix_takes_internationalised_mail(testbed: Testbed, instance: Instance) -> None:
    """SMTPUTF8 goes through the feed to the operator."""
    recipient = f"zażółć.{next(_numbers)}@gmail.test"
    with smtplib.SMTP("127.0.0.1", instance.feed_port, timeout=30) as session:
        session.ehlo()
        message = "Subject: zażółć\r\n\r\n".encode()
        session.sendmail("bounce+1@bounces.test", recipient, message, ["SMTPUTF8", "BODY=8BITMIME"])
    [attempt] = testbed.operators["gmail"].wait_for(lambda each: each.recipient == recipient)
    assert attempt.headers["subject"] == "zażółć"


def test_log_arrives_in_kafka_by_instance(testbed: Testbed, instance: Instance) -> None:
    """What tracking needs of an instance's log is in one partition, in order, keyed by instance."""
    recipient = f"{fresh()}@gmail.test"
    queue_id = feed(instance, recipient)
    records = consume(testbed, holds(f"{queue_id}: to=<{recipient}>"))
    own = [each for each in records if each.key() == b"postfix-a"]
    assert len({each.partition() for each in own}) == 1
    values = [value(each) for each in own if value(each)["source"] == "postfix"]
    assert {each["instance"] for each in values} == {"postfix-a"}
    assert set(values[0]) == {"source", "instance", "tag", "pid", "time", "message"}

    messages = [each["message"] for each in values]
    assert any(message.startswith("daemon started -- version ") for message in messages)
    [active, sent] = [each for each in values if each["message"].startswith(queue_id)]
    assert active["tag"] == "postfix-a/qmgr"
    assert active["message"].endswith("(queue active)")
    assert sent["tag"] == "postfix-a/gmail/smtp"
    assert f"{sent['time']} postfix-a {sent['tag']}[{sent['pid']}]: {sent['message']}" in (
        instance.log.read_text()
    )
    assert not any("message-id=" in message or ": removed" in message for message in messages)


def test_fence_is_refused_and_arrives_in_kafka(testbed: Testbed, instance: Instance) -> None:
    """A fence's recipient is refused at once, leaves no mail, and its line reaches Kafka."""
    token = f"fence+{next(_numbers)}"
    with smtplib.SMTP("127.0.0.1", instance.feed_port, timeout=30) as session:
        session.ehlo()
        session.mail(f"{token}@bounces.test")
        assert session.rcpt("f@fence.invalid")[0] == 554
    records = consume(testbed, holds(f"from=<{token}@bounces.test>"))
    [fence] = [value(each) for each in records if token in value(each).get("message", "")]
    assert fence["tag"] == "postfix-a/feed/smtpd"
    assert fence["message"].startswith("NOQUEUE: reject: RCPT from ")


def test_agent_record_arrives_in_kafka(testbed: Testbed, instance: Instance) -> None:
    """What an agent sends by the forward protocol arrives with source and instance."""
    sender = FluentSender(
        "fairpost", host="127.0.0.1", port=instance.fluentd_port, nanosecond_precision=True
    )
    token = f"claimed-{next(_numbers)}"
    assert sender.emit("agent", {"event": token, "accepted": [{"dispatch_id": 1}], "seconds": 0.5})
    sender.close()
    records = consume(
        testbed, lambda found: any(value(each).get("event") == token for each in found)
    )
    [record] = [each for each in records if value(each).get("event") == token]
    assert record.key() == b"postfix-a"
    assert value(record) == {
        "event": token,
        "accepted": [{"dispatch_id": 1}],
        "seconds": 0.5,
        "source": "agent",
        "instance": "postfix-a",
    }


def test_log_survives_rotations_kills_and_outages(testbed: Testbed) -> None:
    """Lines logged over a rotation, a killed Fluentd and a stopped Kafka all arrive, in order."""
    testbed.kafka.create_topic("troubled")
    instance = testbed.add_instance("postfix-troubled", topic="troubled")
    assert instance.fluentd is not None
    accepted: list[str] = []

    def mail() -> None:
        recipient = f"{fresh()}@gmail.test"
        accepted.append(feed(instance, recipient))
        wait_for_line(instance, f"to=<{recipient}>", "status=sent")

    try:
        mail()
        instance.postfix.rotate_log()
        mail()
        instance.fluentd.kill()
        mail()
        instance.postfix.rotate_log()
        instance.postfix.rotate_log()
        mail()
        testbed.kafka.stop()
        instance.fluentd.start()
        mail()
        testbed.kafka.start()
        records = consume(testbed, holds(f"{accepted[-1]}: to=<"), "troubled")
    finally:
        testbed.remove_instance("postfix-troubled")
    sent = [
        value(each)["message"].partition(":")[0]
        for each in records
        if b"status=sent" in (each.value() or b"")
    ]
    assert list(dict.fromkeys(sent)) == accepted


def test_postfix_keeps_its_queue_over_stop_and_kill(testbed: Testbed) -> None:
    """Mail that waits is still there when Postfix was stopped, or its master killed."""
    instance = testbed.add_instance("postfix-killed")
    try:
        queue_id = feed(instance, f"{fresh('defer')}@gmail.test")
        for end in (instance.postfix.stop, instance.postfix.kill):
            master = instance.postfix.master_pid
            end()
            assert instance.postfix.master_pid is None
            instance.postfix.start()
            assert instance.postfix.master_pid not in (None, master)
            assert queue_id in {each.queue_id for each in instance.postfix.queue()}
    finally:
        testbed.remove_instance("postfix-killed")


def test_absent_service_is_named(testbed: Testbed) -> None:
    """A service that is not part of the testbed, and a taken name, give one clear line."""
    with pytest.raises(ServiceError, match="Kafka is not part of this testbed"):
        _ = Testbed(kafka=False).kafka
    with pytest.raises(ServiceError, match="already; choose another name"):
        testbed.add_instance("postfix-a")


def test_process_that_ends_shows_its_log(tmp_path: Path) -> None:
    """A service that does not start says so with the end of its log."""
    log = tmp_path / "log"
    process = Process("Grumpy", ["sh", "-c", "echo port taken; exit 3"], log=log)
    with pytest.raises(ServiceError, match=r"Grumpy ended with code 3; .*\nport taken"):
        process.start(lambda: False)
    slow = Process("Sleepy", ["sleep", "60"], log=log)
    with pytest.raises(ServiceError, match=r"Sleepy is not ready after 0.1 s"):
        slow.start(lambda: False, timeout=0.1)
    assert not slow.running


@pytest.mark.parametrize(
    "end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name
)
def test_nothing_outlives_the_testbed(end: signal.Signals) -> None:
    """No process is left when the testbed's own is killed or interrupted."""
    command = [sys.executable, "-m", "testbed", "--signed", "shop.example"]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            directory = parent.stdout.readline().split()[1]
            assert "ready; Ctrl-C stops it\n" in parent.stdout
            programs = {program for _, program in processes_of(directory)}
            python = Path(sys.executable).resolve().name
            services = {"java", "postgres", "master", "qmgr", "smtpd", "opendkim", python}
            assert programs >= services
            parent.send_signal(end)
            parent.wait(60)
        finally:
            parent.kill()
    wait_until(lambda: not processes_of(directory), timeout=60, what="the end of all processes")
    if end is not signal.SIGKILL:
        assert parent.returncode == 0
        assert not Path(directory).exists()


def processes_of(directory: str) -> list[tuple[int, str]]:
    """Return the id and program of every process that has to do with a run's folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [process / "cwd", *(process / "fd").iterdir()]
            command = (process / "cmdline").read_text()
            program = (process / "exe").readlink().name
        except OSError:
            # It ended meanwhile, or is a zombie.
            continue
        if directory in command or any(target_of(link).startswith(directory) for link in links):
            found.append((int(process.name), program))
    return found


def target_of(link: Path) -> str:
    """Return where a link points; nowhere when the process closed it meanwhile."""
    try:
        return str(link.readlink())
    except OSError:
        return ""


def test_setup_has_nothing_left_to_do() -> None:
    """The second run of setup.sh says nothing and changes nothing."""
    setup = PROJECT / "testbed" / "setup.sh"
    done = subprocess.run([setup], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


def test_setup_names_what_root_must_install(tmp_path: Path) -> None:
    """Who may not install gets exit code 2 and one line with the command."""
    for program in ("bash", "dirname"):
        (tmp_path / program).symlink_to(find_program(program))
    (tmp_path / "python3").symlink_to(Path(sys.executable).resolve())
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    done = subprocess.run(
        [PROJECT / "testbed" / "setup.sh"],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line == (
        "testbed: missing: openjdk-17-jre-headless systemd openssl ruby maven; run as root: "
        "apt-get install --no-install-recommends openjdk-17-jre-headless systemd openssl ruby maven"
    )
