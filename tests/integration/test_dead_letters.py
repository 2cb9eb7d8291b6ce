"""Dead letters: listed, shown byte for byte, and republished to where their records came from."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import psycopg
import pytest
from confluent_kafka import Message, Producer

from contract.database import Connection, conninfo
from contract.events import (
    CAMPAIGNS,
    DEAD_LETTERS,
    DELIVERY_LOG,
    DUE_EMAILS,
    SEND_EMAILS,
    DeadLetter,
    encode,
)
from processor.consuming import Record
from processor.dead_letter_topic import DeadLetterError, DeadLetterTopic, StoredLetter
from processor.dead_letters import MAX_VALUE, dead_letter, value_of
from processor.emitting import Emission
from processor.publishing import Publisher
from processor.republishing import KEYS
from processor.settings import ProcessorSettings
from processor.topics import TopicsError
from testbed.ports import reserve_port
from testbed.processes import wait_until
from tests.conftest import Database, TestTopics
from tests.integration.conftest import START, Answer, Fairpost, Start, due, fetch

PATIENCE = 60

BAD: dict[str, tuple[str, bytes]] = {
    CAMPAIGNS: ("spring", '{"type": "campaign.scheduled", "name": "Frühling"\n}'.encode()),
    DUE_EMAILS: ("user5", b'{"user_id": "user5", "note": "\\u0000 and a real one: \x00"}'),
    SEND_EMAILS: ("user9", b"\xff\xfe no text\r\n"),
    DELIVERY_LOG: ("postfix-a", b'{"source": "postfix", "instance": "postfix-a"}'),
}
"""By topic: a key, and a value that cannot be used."""


def produce(settings: ProcessorSettings, name: str, key: str | None, value: bytes) -> None:
    """Publishes as a producing service does."""
    producer = Producer(
        {
            "bootstrap.servers": settings.kafka_bootstrap_servers,
            "partitioner": "murmur2_random",
            "log_level": 2,
        }
    )
    producer.produce(settings.topic(name), key=key, value=value)
    assert producer.flush(30) == 0


def bury(settings: ProcessorSettings, *letters: DeadLetter) -> None:
    """Publishes dead letters."""
    topic = settings.topic(DEAD_LETTERS)
    emissions = [Emission(topic, letter.topic, letter) for letter in letters]
    assert set(Publisher(settings.brokers).publish(emissions)) == {None}


def letter(
    settings: ProcessorSettings,
    value: bytes,
    *,
    name: str = DUE_EMAILS,
    key: str | None = None,
    offset: int = 17,
) -> DeadLetter:
    """The dead letter of a record."""
    record = Record(
        settings.topic(name), 1, offset, START, value, None if key is None else key.encode()
    )
    return dead_letter(record, f"{name}: why")


def read(settings: ProcessorSettings, **limits: Any) -> list[StoredLetter]:
    """What stands on the topic."""
    with DeadLetterTopic(settings) as dead:
        return list(dead.read(**limits))


def listed(fairpost: Fairpost, *words: str) -> list[dict[str, Any]]:
    """What `fairpost dead-letters list --json` lists."""
    answer = fairpost("dead-letters", "list", "--json", *words)
    assert answer.code == 0, answer.err
    rows: list[dict[str, Any]] = msgspec.json.decode(answer.out)
    return rows


def where(messages: Sequence[Message]) -> list[tuple[int | None, bytes | None, bytes | None]]:
    """Partition, key and value of each."""
    return [(m.partition(), m.key(), m.value()) for m in messages]


# ------------------------------------------------------------------ the whole way


def test_dead_letters_of_every_topic(
    settings: ProcessorSettings, topics: TestTopics, fairpost: Fairpost, start: Start
) -> None:
    """What worker and tracker cannot use of any topic is listed, shown byte for byte, and republished to its partition, where it is read again."""
    start("worker")
    start("tracker")
    for name, (key, value) in BAD.items():
        produce(settings, name, key, value)

    def buried(number: int) -> None:
        wait_until(
            lambda: len(topics.read(DEAD_LETTERS)) >= number, timeout=PATIENCE, what="dead letters"
        )
        assert len(topics.read(DEAD_LETTERS)) == number

    buried(4)
    originals = {name: where(topics.read(name)) for name in BAD}
    rows = listed(fairpost)
    assert {row["topic"] for row in rows} == {settings.topic(name) for name in BAD}
    for name, (_, value) in BAD.items():
        [row] = listed(fairpost, "--topic", name)
        assert row in rows
        [(partition, _, _)] = originals[name]
        assert row["place"] == f"{settings.topic(name)}/{partition}/0"
        assert row["reason"].startswith(f"{name}: ")
        shown = fairpost("dead-letters", "show", row["position"])
        assert (shown.code, shown.out) == (0, value)
        assert f"reason    {row['reason']}\n" in shown.err
        assert fairpost("dead-letters", "republish", row["position"], "--yes").code == 0
    buried(8)
    for name in BAD:
        [original] = originals[name]
        assert where(topics.read(name)) == [original] * 2
        assert len(listed(fairpost, "--topic", name)) == 2
    shown_again = {row["position"] for row in listed(fairpost)} - {row["position"] for row in rows}
    values = [fairpost("dead-letters", "show", position).out for position in shown_again]
    assert sorted(values) == sorted(value for _, value in BAD.values())


def test_what_was_mended_is_sent_once(
    settings: ProcessorSettings,
    database: Database,
    topics: TestTopics,
    fairpost: Fairpost,
    start: Start,
) -> None:
    """Due e-mails that the database refused are reserved and planned once when they are republished after a repair, however often."""
    with psycopg.connect(conninfo(database.owner, "test"), autocommit=True) as owner:
        owner.execute("ALTER TABLE dispatches ADD CONSTRAINT odd CHECK (user_id !~ '[02468]$')")
        start("worker")
        emails = [due(n) for n in range(20)]
        for email in emails:
            produce(settings, DUE_EMAILS, email.user_id, encode(email))
        wait_until(
            lambda: len(topics.read(DEAD_LETTERS)) == 10, timeout=PATIENCE, what="dead letters"
        )
        arguments = ("dead-letters", "republish", "--topic", DUE_EMAILS, "--all", "--yes")
        still_bad = fairpost(*arguments)
        assert (still_bad.code, still_bad.out) == (0, b"")
        assert still_bad.err == "dead-letters: 10 published again\n"
        wait_until(
            lambda: len(topics.read(DEAD_LETTERS)) == 20, timeout=PATIENCE, what="dead letters"
        )
        owner.execute("ALTER TABLE dispatches DROP CONSTRAINT odd")
        for _ in range(2):
            assert fairpost(*arguments).err == "dead-letters: 10 published again\n"

        def planned() -> list[tuple[Any, ...]]:
            return owner.execute(
                "SELECT user_id FROM dispatches JOIN messages USING (dispatch_id)"
            ).fetchall()

        wait_until(lambda: len(planned()) == 20, timeout=PATIENCE, what="planned")
        # What comes behind it in each partition is planned when all before it was read.
        for n in range(100, 110):
            produce(settings, DUE_EMAILS, f"user{n}", encode(due(n)))
        wait_until(lambda: len(planned()) == 30, timeout=PATIENCE, what="planned")
        numbers = [*range(20), *range(100, 110)]
        assert sorted(planned()) == sorted((f"user{n}",) for n in numbers)
    partitions: dict[bytes | None, set[int | None]] = {}
    for partition, key, _ in where(topics.read(DUE_EMAILS)):
        partitions.setdefault(key, set()).add(partition)
    assert {len(found) for found in partitions.values()} == {1}


# ------------------------------------------------------------------ reading


def test_reading_an_empty_topic(settings: ProcessorSettings, topics: TestTopics) -> None:
    """No dead letters is an empty list."""
    del topics
    assert read(settings) == read(settings, last=5) == read(settings, since=START) == []


def test_the_newest_come_first(
    settings: ProcessorSettings, topics: TestTopics, fairpost: Fairpost
) -> None:
    """The listing is of the newest, newest first, as many as asked for; that there are more is told."""
    bury(settings, *(letter(settings, b"%d" % n, offset=n) for n in range(30)))
    all_of_them = listed(fairpost)
    assert [row["place"] for row in all_of_them] == [
        f"{settings.topic(DUE_EMAILS)}/1/{n}" for n in reversed(range(30))
    ]
    assert [row["position"] for row in all_of_them] == [f"0:{n}" for n in reversed(range(30))]
    assert listed(fairpost, "--limit", "3") == all_of_them[:3]
    assert listed(fairpost, "--limit", "3", "--topic", DUE_EMAILS) == all_of_them[:3]
    assert listed(fairpost, "--topic", SEND_EMAILS) == []
    cut = fairpost("dead-letters", "list", "--limit", "29")
    assert cut.err == "dead-letters: the newest 29; see more with --limit\n"
    assert len(cut.out.splitlines()) == 30
    assert fairpost("dead-letters", "list", "--limit", "30").err == ""
    assert len(topics.read(DEAD_LETTERS)) == 30


def test_since_when(settings: ProcessorSettings, topics: TestTopics, fairpost: Fairpost) -> None:
    """What was written before a time can be left out, whichever zone the time is told in."""
    bury(settings, letter(settings, b"old"))
    wait_until(
        lambda: datetime.now(UTC) > read(settings)[0].at + timedelta(milliseconds=2),
        timeout=10,
        what="a later moment",
    )
    bury(settings, letter(settings, b"new"))
    new = read(settings)[1]
    assert read(settings, since=new.at) == [new]
    assert read(settings, since=new.at + timedelta(hours=1)) == []
    assert len(read(settings, since=datetime(1, 1, 1, tzinfo=UTC))) == 2
    local = (new.at.replace(tzinfo=None) + timedelta(hours=2)).isoformat() + "+02:00"
    for since in (new.at.isoformat(), new.at.replace(tzinfo=None).isoformat(), local):
        assert [row["position"] for row in listed(fairpost, "--since", since)] == [new.position]
    assert len(topics.read(DEAD_LETTERS)) == 2


def test_a_dead_letter_whole(
    settings: ProcessorSettings, topics: TestTopics, fairpost: Fairpost
) -> None:
    """As JSON a dead letter has all that is kept of it; at a terminal nothing of it is obeyed."""
    del topics
    buried = letter(settings, b"\xff\x1b[2J", key="a\x1b[31mkey")
    bury(settings, buried)
    [stored] = read(settings)
    shown = fairpost("dead-letters", "show", "0:0", "--json")
    assert msgspec.json.decode(shown.out, type=list[StoredLetter]) == [stored]
    assert value_of(stored) == b"\xff\x1b[2J"
    assert shown.err == ""
    told = fairpost("dead-letters", "show", "0:0").err
    assert "key       a\\x1b[31mkey\n" in told
    assert "\x1b" not in told


def test_what_is_no_dead_letter_is_left_out(
    settings: ProcessorSettings,
    topics: TestTopics,
    fairpost: Fairpost,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Records of somebody else's on the topic hide none of the dead letters, and are told of."""
    del topics
    produce(settings, DEAD_LETTERS, None, b"no JSON")
    bury(settings, letter(settings, b"bad"))
    assert [row["position"] for row in listed(fairpost)] == ["0:1"]
    assert "0:0: left out: dead-letters: JSON is malformed" in caplog.text
    shown = fairpost("dead-letters", "show", "0:0")
    assert (shown.code, shown.out) == (1, b"")
    assert shown.err.startswith("0:0: dead-letters: ")


@pytest.mark.parametrize("position", ["0:2", "0:99", "7:0"])
def test_what_is_not_there(
    settings: ProcessorSettings, topics: TestTopics, fairpost: Fairpost, position: str
) -> None:
    """A position without a dead letter is told in one line, with what there is."""
    del topics
    with DeadLetterTopic(settings) as dead, pytest.raises(DeadLetterError):
        dead.find(position)
    bury(settings, letter(settings, b"a"), letter(settings, b"b"))
    for command in (("show", position), ("republish", position, "--yes")):
        answer = fairpost("dead-letters", *command)
        assert (answer.code, answer.out) == (1, b"")
        first = answer.err.splitlines()[0]
        assert first.startswith(f"{position}: ")
        assert ("0:0 to 0:1" in first) == position.startswith("0:")


def test_no_topic(settings: ProcessorSettings) -> None:
    """A topic that is missing is told with the command that makes it."""
    with pytest.raises(TopicsError, match="fairpost topics create"):
        read(settings)


def test_kafka_away(settings: ProcessorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that does not answer is one line that names it and the setting."""
    monkeypatch.setattr("processor.dead_letter_topic._TIMEOUT", 0.5)
    server = f"127.0.0.1:{reserve_port()}"
    with pytest.raises(
        TopicsError,
        match=f"{server}: .*are kafka_bootstrap_servers and kafka_security_protocol right",
    ):
        read(settings.model_copy(update={"kafka_bootstrap_servers": server}))


# ------------------------------------------------------------------ republishing


async def republish(fairpost: Fairpost, *words: str, stdin: str = "") -> Answer:
    """Runs `fairpost dead-letters republish` beside the loop."""
    return await asyncio.to_thread(fairpost, "dead-letters", "republish", *words, stdin=stdin)


@pytest.mark.parametrize("name", KEYS)
async def test_under_its_key(
    settings: ProcessorSettings, topics: TestTopics, fairpost: Fairpost, name: str
) -> None:
    """A record goes back under its own key; an unknown key is the one that its value names, and both lead to one partition."""
    value = msgspec.json.encode({KEYS[name]: "somebody", "x": "ä"})
    produce(settings, name, "somebody", value)
    bury(
        settings,
        letter(settings, value, name=name, key="somebody"),
        letter(settings, value, name=name, key=None),
        letter(settings, value, name=name, key="somebody else"),
        letter(settings, b"names nobody", name=name),
    )
    answer = await republish(fairpost, "0:0", "0:1", "0:2", "0:3", "--yes")
    assert (answer.code, answer.err) == (0, "dead-letters: 4 published again\n")
    messages = where(topics.read(name))
    assert Counter((key, value) for _, key, value in messages) == {
        (b"somebody", value): 3,
        (b"somebody else", value): 1,
        (None, b"names nobody"): 1,
    }
    assert len({partition for partition, key, _ in messages if key == b"somebody"}) == 1


async def test_what_cannot_be_republished(
    settings: ProcessorSettings, topics: TestTopics, fairpost: Fairpost, owner: Connection
) -> None:
    """What was cut or is not of this installation is refused in a line each, exit code 1; the others are published."""
    whole, cut = b"x" * MAX_VALUE, b"x" * (MAX_VALUE + 1)
    foreign = msgspec.structs.replace(letter(settings, b"1"), topic="somebody.elses")
    broken = msgspec.structs.replace(letter(settings, b"\xff"), value="no base64")
    bury(settings, letter(settings, cut), foreign, broken, letter(settings, whole, key="k"))
    answer = await republish(fairpost, "0:0", "0:1", "0:2", "0:3", "0:3", "0:9", "--yes")
    assert (answer.code, answer.out) == (1, b"")
    missing, *refused, last = answer.err.splitlines()
    assert missing.startswith("0:9: no such dead letter")
    assert [line.partition(":")[0] + ":" + line.split(":")[1] for line in refused] == [
        "0:0",
        "0:1",
        "0:2",
    ]
    assert "have it published anew" in refused[0]
    assert "somebody.elses" in refused[1]
    assert "base64" in refused[2]
    assert last == "dead-letters: 1 published again, 4 not"
    assert [(key, value) for _, key, value in where(topics.read(DUE_EMAILS))] == [(b"k", whole)]
    assert await fetch(owner, "SELECT action, subject, details FROM audit") == [
        ("dead_letters.republish", settings.topic(DEAD_LETTERS), {"positions": ["0:3"]})
    ]


async def test_all_of_a_topic(
    settings: ProcessorSettings, topics: TestTopics, fairpost: Fairpost, owner: Connection
) -> None:
    """`--all` publishes each record of one topic once, the last copy of it, in the order in which they stand."""
    values = [b"pause", b"resume", b"pause", b"cancel"]
    bury(
        settings,
        *(letter(settings, value, name=CAMPAIGNS, key="c") for value in values),
        letter(settings, b"other"),
        letter(settings, b"resume", name=CAMPAIGNS, key="d"),
    )
    answer = await republish(fairpost, "--topic", CAMPAIGNS, "--all", "--yes")
    assert (answer.code, answer.err) == (0, "dead-letters: 4 published again\n")
    assert [(key, value) for _, key, value in where(topics.read(CAMPAIGNS))] == [
        (b"c", b"resume"),
        (b"c", b"pause"),
        (b"c", b"cancel"),
        (b"d", b"resume"),
    ]
    assert topics.read(DUE_EMAILS) == []
    [(actor, details)] = await fetch(owner, "SELECT actor, details FROM audit")
    assert actor
    assert details == {"positions": ["0:1", "0:2", "0:3", "0:5"]}
    nothing = await republish(fairpost, "--topic", SEND_EMAILS, "--all", "--yes")
    assert (nothing.code, nothing.err) == (0, "dead-letters: 0 published again\n")
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    none_yet = await republish(fairpost, "--topic", CAMPAIGNS, "--all", "--since", later, "--yes")
    assert (none_yet.code, none_yet.err) == (0, "dead-letters: 0 published again\n")


async def test_many(settings: ProcessorSettings, topics: TestTopics, fairpost: Fairpost) -> None:
    """More than one batch is published whole, each batch on record."""
    bury(settings, *(letter(settings, encode(due(n)), key=f"user{n}") for n in range(2_500)))
    answer = await republish(fairpost, "--topic", DUE_EMAILS, "--all", "--yes")
    assert answer.err == "dead-letters: 2500 published again\n"
    assert Counter(topics.values(DUE_EMAILS)) == Counter(encode(due(n)) for n in range(2_500))


@pytest.mark.parametrize(("stdin", "published"), [("y\n", 1), ("n\n", 0), ("", 0)])
async def test_it_asks_first(  # noqa: PLR0917  fixtures
    settings: ProcessorSettings,
    topics: TestTopics,
    fairpost: Fairpost,
    owner: Connection,
    stdin: str,
    published: int,
) -> None:
    """Without `--yes` a person is asked, and a closed input is no yes."""
    bury(settings, letter(settings, b"1"))
    answer = await republish(fairpost, "0:0", stdin=stdin)
    assert "Publish 1 dead letters again? [y/N]" in answer.err
    assert (answer.code == 0) == bool(published)
    assert len(topics.read(DUE_EMAILS)) == published
    assert len(await fetch(owner, "SELECT FROM audit")) == published


def test_without_a_record_nothing_is_published(
    settings: ProcessorSettings,
    topics: TestTopics,
    fairpost: Fairpost,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be put on record is not done: a database that is away is told in one line."""
    bury(settings, letter(settings, b"1"))
    monkeypatch.setenv("FAIRPOST_DATABASE", f"host=127.0.0.1 port={reserve_port()} dbname=x")
    answer = fairpost("dead-letters", "republish", "0:0", "--yes")
    assert (answer.code, answer.out) == (1, b"")
    assert answer.err.startswith("database: ")
    assert topics.read(DUE_EMAILS) == []


@pytest.mark.parametrize(
    "words",
    [
        ("republish",),
        ("republish", "0:1", "--topic", DUE_EMAILS),
        ("republish", "0:1", "--since", "2026-05-01"),
        ("republish", "0:1", "--topic", DUE_EMAILS, "--all"),
        ("republish", "--all"),
        ("republish", "--topic", DUE_EMAILS),
        ("republish", "1"),
        ("show", "0:1:2"),
        ("show", "0:x"),
        ("show", "-1:0"),
        ("list", "--topic", "delivery-status"),
        ("list", "--since", "yesterday"),
        ("list", "--limit", "0"),
    ],
    ids=" ".join,
)
def test_wrong_usage(fairpost: Fairpost, words: tuple[str, ...]) -> None:
    """What makes no sense is exit code 2, before any service is asked."""
    answer = fairpost("dead-letters", *words)
    assert (answer.code, answer.out) == (2, b"")
    assert answer.err.startswith("Usage: ")
