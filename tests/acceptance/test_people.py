"""What people do to running campaigns: pause and resume, cancel, change; all within a second."""

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime, timedelta

import pytest

from benchmarks.pace import handed_over
from testbed import Testbed
from testbed.installation import Installation, OperatorRule
from testbed.mailbox import Attempt
from testbed.ports import LOOPBACK
from tests.acceptance.conftest import IMPATIENT, House

Build = Callable[..., House]

SLOW = 1200
"""Messages a minute: a campaign of some hundred takes long enough to be stopped."""

CONTACTS = 150


def start_campaign(house: House, campaign_id: str) -> None:
    """A campaign that is under way, with most of it still to go."""
    house.start()
    house.publish_campaign(campaign_id)
    house.publish_due(campaign_id, [f"user{n}@gmail.test" for n in range(CONTACTS)])
    house.wait_for(lambda: house.handed(campaign_id) > 10, "the first hand-overs")


def test_pause_holds_and_resume_goes_on(build: Build) -> None:
    """A held campaign is handed over no further until a person resumes it; then every contact gets it once."""
    house = build({"gmail": SLOW})
    start_campaign(house, "held")
    house.installation.fairpost("campaigns", "pause", "held")
    [(held_at,)] = house.query("SELECT held_at FROM campaigns")
    house.wait_for(
        lambda: house.query("SELECT count(*) FROM chunks WHERE instance IS NOT NULL") == [(0,)],
        "the chunk given back",
    )
    [(last,)] = house.query("SELECT max(handed_at) FROM messages")
    assert last <= held_at + timedelta(seconds=1)
    handed = house.handed("held")
    assert handed < CONTACTS
    # Another campaign passes it meanwhile: its lane is free.
    house.publish_campaign("other")
    house.publish_due("other", ["a@gmail.test"])
    house.wait_for_states("other", {"sent": 1})
    assert house.handed("held") == handed
    assert house.counts("held")["held_by"] is not None

    house.installation.fairpost("campaigns", "resume", "held")
    house.wait_for_states("held", {"sent": CONTACTS})
    assert house.reckon().complaints == ()
    actions = house.query("SELECT action FROM audit WHERE subject = 'held' ORDER BY audit_id")
    assert actions == [
        ("campaign.publish",),
        ("due_emails.publish",),
        ("campaign.hold",),
        ("campaign.lift",),
    ]


def test_cancel_stops_within_a_second(build: Build) -> None:
    """A second after the cancellation is stored nothing more is handed over, and the rest is `cancelled`."""
    house = build({"gmail": SLOW // 5})
    start_campaign(house, "stopped")
    house.installation.fairpost("campaigns", "cancel", "stopped", "--yes")
    [(cancelled_at,)] = house.query("SELECT max(at) FROM audit WHERE action = 'campaign.cancel'")
    house.wait_for_states("stopped", {"planned": 0, "handed": 0, "queued": 0})
    [(last,)] = house.query("SELECT max(handed_at) FROM messages")
    assert last <= cancelled_at + timedelta(seconds=1)
    counts = house.counts("stopped")
    assert counts["sent"] + counts["cancelled"] == counts["dispatches"] == CONTACTS
    assert counts["cancelled"] > 0
    reckoning = house.reckon()
    assert reckoning.complaints == ()

    def told() -> int:
        return sum(t[-1].status == "cancelled" for t in house.statuses().values())

    house.wait_for(lambda: told() == counts["cancelled"], "delivery-status of what was cancelled")
    # What comes late for it is cancelled at once.
    house.publish_due("stopped", [f"late{n}@gmail.test" for n in range(CONTACTS, CONTACTS + 5)])
    again = house.installation.fairpost("campaigns", "resume", "stopped", check=False)
    assert again.returncode == 1
    assert again.stderr == "campaign 'stopped': was cancelled, which is final\n"


def test_a_changed_template_is_used_for_what_is_not_yet_handed_over(build: Build) -> None:
    """A campaign published again replaces its content for the messages that still wait."""
    house = build({"gmail": SLOW // 3})
    start_campaign(house, "changed")
    house.publish_campaign("changed", templates={"offer": {"subject": "Corrected", "text": "x"}})
    house.wait_for_states("changed", {"sent": CONTACTS})
    subjects = [
        a.headers["subject"] for a in sorted(house.operators["gmail"].accepted(), key=_time)
    ]
    assert subjects[0].startswith("For ")
    assert subjects[-1] == "Corrected"
    assert subjects == sorted(subjects, key=lambda subject: subject == "Corrected")


def _time(attempt: Attempt) -> float:
    return attempt.time


def test_a_postponed_campaign_stops(build: Build) -> None:
    """A campaign published again with a later date stops within a second, and goes on when it is due again."""
    house = build({"gmail": SLOW})
    start_campaign(house, "postponed")
    house.publish_campaign("postponed", scheduled_for="2036-01-01T00:00:00Z")
    house.wait_for(
        lambda: (
            house.query(
                "SELECT revision, (SELECT count(*) FROM chunks WHERE instance IS NOT NULL) FROM campaigns"
            )
            == [(2, 0)]
        ),
        "the chunk given back",
    )
    handed = house.handed("postponed")
    assert handed < CONTACTS
    house.publish_campaign("other")
    house.publish_due("other", ["a@gmail.test"])
    house.wait_for_states("other", {"sent": 1})
    assert house.handed("postponed") == handed
    house.publish_campaign("postponed")
    house.wait_for_states("postponed", {"sent": CONTACTS})
    assert house.reckon().complaints == ()


# ------------------------------------------------------------------ a slow Postfix

THOUGHT_SECONDS = 0.3
"""What Postfix thinks about each recipient: a lane is within a batch nearly all the time, and none gets to its end."""
FAST = 6000
CHUNK = 120


class Policy(socketserver.StreamRequestHandler):
    """A policy server that takes its time (https://www.postfix.org/SMTPD_POLICY_README.html)."""

    def handle(self) -> None:
        """Answers request after request."""
        while line := self.rfile.readline():
            if line == b"\n":
                time.sleep(THOUGHT_SECONDS)
                self.wfile.write(b"action=dunno\n\n")


@pytest.fixture(scope="module")
def slow(testbed: Testbed, template: str) -> Iterator[House]:
    """A running installation whose Postfix takes some fifteen messages a second."""
    with ExitStack() as stack:
        policy = stack.enter_context(socketserver.ThreadingTCPServer((LOOPBACK, 0), Policy))
        policy.daemon_threads = True
        threading.Thread(target=policy.serve_forever).start()
        stack.callback(policy.shutdown)
        operators = testbed.add_operators({"gmail": ["gmail.test"]})
        rules = [OperatorRule("gmail", ["gmail.test"], FAST)]
        installation = stack.enter_context(Installation(testbed, "slow", rules, template=template))
        service = f"check_policy_service inet:{LOOPBACK}:{policy.server_address[1]}"
        host = testbed.add_instance(
            "mta-slow",
            operators=operators.values(),
            topic=installation.topic("delivery-log"),
            postfix=IMPATIENT | {"smtpd_sender_restrictions": service},
        )
        stack.callback(testbed.remove_instance, host.name)
        house = House(installation, {host.name: host}, operators)
        with installation.connect() as connection:
            connection.execute("UPDATE operators SET chunk_size = %s", (CHUNK,))
        house.start()
        yield house


def publish_event(house: House, campaign_id: str, kind: str) -> None:
    """Publishes an event of a campaign that has no other fields."""
    path = house.installation.directory / f"{campaign_id}-{kind}.json"
    path.write_text(json.dumps({"type": f"campaign.{kind}", "campaign_id": campaign_id}))
    house.installation.fairpost("publish", "campaign", str(path))


def command(*words: str) -> Callable[[House, str], None]:
    """A command of fairpost's; `CAMPAIGN` stands for the campaign's id."""

    def run(house: House, campaign_id: str) -> None:
        house.installation.fairpost(*(campaign_id if w == "CAMPAIGN" else w for w in words))

    return run


Act = Callable[[House, str], None]

# What a person or a producer does, how the database says that it is done, and what undoes it.
STOPS: dict[str, tuple[Act, str, Act | None]] = {
    "hold": (
        command("campaigns", "pause", "CAMPAIGN"),
        "SELECT held_at IS NOT NULL FROM campaigns WHERE campaign_id = %(campaign)s",
        command("campaigns", "resume", "CAMPAIGN"),
    ),
    "pause": (
        lambda house, c: publish_event(house, c, "paused"),
        "SELECT state = 'paused' FROM campaigns WHERE campaign_id = %(campaign)s",
        lambda house, c: publish_event(house, c, "resumed"),
    ),
    "postponement": (
        lambda house, c: house.publish_campaign(c, scheduled_for="2036-01-01T00:00:00Z"),
        "SELECT scheduled_for > '2035-01-01' FROM campaigns WHERE campaign_id = %(campaign)s",
        lambda house, c: house.publish_campaign(c),
    ),
    "cancel": (
        command("campaigns", "cancel", "CAMPAIGN", "--yes"),
        "SELECT state = 'cancelled' FROM campaigns WHERE campaign_id = %(campaign)s",
        None,
    ),
    "cancelled event": (
        lambda house, c: publish_event(house, c, "cancelled"),
        "SELECT state = 'cancelled' FROM campaigns WHERE campaign_id = %(campaign)s",
        None,
    ),
    "operator": (
        command("operators", "pause", "gmail"),
        "SELECT paused_at IS NOT NULL FROM operators WHERE operator = 'gmail'",
        command("operators", "resume", "gmail"),
    ),
    "instance": (
        command("instances", "pause", "mta-slow"),
        "SELECT paused_at IS NOT NULL FROM instances WHERE instance = 'mta-slow'",
        command("instances", "resume", "mta-slow"),
    ),
    "fleet": (
        command("sending", "off"),
        "SELECT NOT sending FROM fleet",
        command("sending", "on"),
    ),
}

LAST = "SELECT max(at) FROM handovers JOIN chunks USING (chunk_id) WHERE campaign_id = %s"
# The chunk that is not at its end, and the one that is handed over from some time on.
INTERRUPTED = """
SELECT chunk_id FROM chunks WHERE campaign_id = %s AND planned > 0 ORDER BY number LIMIT 1"""
NEXT = "SELECT chunk_id FROM handovers WHERE at > %s ORDER BY at LIMIT 1"


def stored_at(house: House, condition: str, campaign_id: str) -> datetime:
    """When it was first seen that the condition holds: by the database's clock, just after the commit."""
    with house.installation.connect() as connection:
        cursor = connection.cursor()
        while cursor.execute(condition.encode(), {"campaign": campaign_id}).fetchone() != (True,):
            pass
        [(now,)] = cursor.execute("SELECT clock_timestamp()").fetchall()
    assert isinstance(now, datetime)
    return now


@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_reaches_a_lane_within_a_second_also_when_postfix_is_slow(
    slow: House, stop: str
) -> None:
    """A second after the command or event is stored Postfix gets nothing more; what undoes it goes on in the same chunk.

    By the database, and by the queue ids of all that Postfix ever took: they tell when it did.
    """
    act, condition, undo = STOPS[stop]
    campaign_id = stop.replace(" ", "-")
    slow.publish_campaign(campaign_id)
    slow.publish_due(campaign_id, [f"user{n}@gmail.test" for n in range(CONTACTS)])
    slow.wait_for(lambda: slow.handed(campaign_id) > 5, "hand-overs")
    with ThreadPoolExecutor() as pool:
        seen: Future[datetime] = pool.submit(stored_at, slow, condition, campaign_id)
        act(slow, campaign_id)
        stored = seen.result()
    free = "SELECT count(*) FROM chunks WHERE instance IS NOT NULL"
    slow.wait_for(lambda: slow.query(free) == [(0,)], "the chunk given back")
    [(last,)] = slow.query(LAST, campaign_id)
    assert last <= stored + timedelta(seconds=1)

    undone = datetime.max.replace(tzinfo=stored.tzinfo)
    if undo is not None:
        [(interrupted,)] = slow.query(INTERRUPTED, campaign_id)
        [(undone,)] = slow.query("SELECT clock_timestamp()")
        undo(slow, campaign_id)
        slow.wait_for(lambda: slow.query(LAST, campaign_id) > [(undone,)], "hand-overs that go on")
        assert slow.query(NEXT, undone) == [(interrupted,)]
        slow.installation.fairpost("campaigns", "cancel", campaign_id, "--yes")
    slow.wait_for_states(campaign_id, {"planned": 0, "handed": 0, "queued": 0})
    assert slow.counts(campaign_id)["cancelled"] > 0
    [host] = slow.hosts.values()
    mine = "SELECT dispatch_id, 'gmail' FROM dispatches WHERE campaign_id = %s"
    by_log = handed_over(host.log, dict(slow.query(mine, campaign_id)))["gmail"]
    # On a busy machine Postfix comes late to what it was given in time; a lane that went on would not stop a second later.
    last_one = stored.timestamp() + 2
    assert [at for at in by_log if last_one < at < undone.timestamp()] == []
    assert slow.reckon().complaints == ()
