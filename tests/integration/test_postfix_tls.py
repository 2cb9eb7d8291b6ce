"""TLS from Postfix to a mailbox operator that offers STARTTLS."""

import smtplib
from collections.abc import Iterator

import pytest

from processor.log_header import split_header
from testbed import Testbed, fluentd_config
from testbed.fluentd import CONFIGURATION
from testbed.fluentd_pipeline import Pipeline
from testbed.mailbox import MailboxOperator
from testbed.ports import LOOPBACK
from testbed.postfix import Postfix
from testbed.processes import wait_until

PATIENCE = 60
MAILS = 200
ESTABLISHED = ": Untrusted TLS connection established to "


@pytest.fixture(scope="module")
def operator(testbed: Testbed) -> MailboxOperator:
    """Offers STARTTLS."""
    return testbed.add_operators({"tls": ["tls.test"]}, tls=True)["tls"]


@pytest.fixture(scope="module")
def log(testbed: Testbed, operator: MailboxOperator) -> Iterator[list[str]]:
    """What a Postfix logged that delivered the mail of these tests; it is done."""
    held = {"defer_transports": operator.name}
    with Postfix("tls", testbed.directory / "postfix-tls", [operator], held) as postfix:
        with smtplib.SMTP(LOOPBACK, postfix.feed_port, timeout=PATIENCE) as session:
            for number in range(MAILS):
                session.sendmail(
                    f"bounce+{number}@bounces.test", f"u{number}@tls.test", "Subject: Hi\r\n\r\nHi"
                )
        # All at once, so that it has more than it can do.
        postfix.set_parameters({"defer_transports": ""})
        postfix.reload()
        postfix.flush()
        operator.wait_for(lambda attempt: attempt.accepted, count=MAILS)
        wait_until(lambda: not postfix.queue(), timeout=PATIENCE, what="an empty queue")
        yield postfix.log.read_text().splitlines()


def test_mail_arrives_over_tls(operator: MailboxOperator, log: list[str]) -> None:
    """Every message comes over TLS, though the operator's certificate is signed by nobody, and the log tells it."""
    assert {attempt.tls for attempt in operator.accepted()} == {"TLSv1.3"}
    assert any(f"{ESTABLISHED}{LOOPBACK}[" in line and ": TLSv1.3 with" in line for line in log)


def test_a_connection_carries_many_messages(log: list[str]) -> None:
    """While there is mail for an operator, connections with their handshakes are used again and again."""
    assert 0 < sum(ESTABLISHED in line for line in log) < MAILS / 2
    assert sum(", conn_use=" in line for line in log) > MAILS / 2


def test_lines_about_tls_stay_on_the_host(log: list[str]) -> None:
    """Of what Postfix logs with smtp_tls_loglevel = 1, Fluentd ships what became of the mail only."""
    environment = {
        "FAIRPOST_INSTANCE": "postfix-tls",
        "FAIRPOST_KAFKA_BOOTSTRAP_SERVERS": "kafka1.test:9092",
    }
    configuration = fluentd_config.parse(CONFIGURATION.read_text(), environment)
    pipeline = Pipeline(configuration)
    label = configuration.one("source", "tail").parameters["@label"]
    messages = [split[1] for line in log if (split := split_header(line))]
    shipped = [
        message
        for message in messages
        if pipeline.pass_through(label, "fairpost.postfix", {"tag": "t", "message": message})
    ]
    assert any("TLS" in message for message in messages)
    assert not [message for message in shipped if "TLS" in message]
    assert sum("status=sent" in message for message in shipped) == MAILS
