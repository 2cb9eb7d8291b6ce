"""Proves that fluent.conf is read as Fluentd reads it, and that its stand-in does nothing that it does not say."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.fluentd import CONFIGURATION
from testbed.fluentd_config import ConfigurationError, Section, parse, tag_matches, to_regexp
from testbed.fluentd_pipeline import ROOT, Pipeline
from testbed.postfix import DEPLOY, KEPT_LOGS

TEXT = CONFIGURATION.read_text()
ENVIRONMENT = {
    "FAIRPOST_INSTANCE": "postfix-a",
    "FAIRPOST_KAFKA_BOOTSTRAP_SERVERS": "kafka1.test:9092,kafka2.test:9092",
}
SENT = "4jdWPx3hz5zJLpv: to=<a@gmail.test>, relay=none, delay=1, delays=1/0/0/0, dsn=2.0.0, status=sent (ok)"
LINE = {"time": "Nov 30 17:25:01", "host": "mx1", "tag": "postfix-a/gmail/smtp", "pid": 7}


def load(text: str = TEXT, **environment: str) -> Section:
    """A configuration, in the environment of a mail host."""
    return parse(text, ENVIRONMENT | environment)


def outlet(configuration: Section, plugin: str) -> str:
    """The label into which a source sends."""
    return configuration.one("source", plugin).parameters.get("@label", ROOT)


def test_a_line_is_shipped_with_what_tracking_needs() -> None:
    """The host's name goes, source and instance come; what no tracker reads is not shipped at all."""
    configuration = load()
    pipeline, label = Pipeline(configuration), outlet(configuration, "tail")
    assert pipeline.pass_through(label, "fairpost.postfix", {**LINE, "message": SENT}) == {
        "source": "postfix",
        "instance": "postfix-a",
        "tag": "postfix-a/gmail/smtp",
        "pid": 7,
        "time": "Nov 30 17:25:01",
        "message": SENT,
    }
    assert (
        pipeline.pass_through(label, "fairpost.postfix", {**LINE, "message": "4jdWP: removed"})
        is None
    )


@given(
    st.text("fairpost.gen*d", max_size=20)
    | st.sampled_from(
        ["fairpost.agent", "fairpost.postfix", "fairpost", "fairpost.agent.x", "fluent.warn"]
    ),
    st.dictionaries(
        st.sampled_from(
            ["source", "instance", "tag", "message", "time", "partition", "topic", "event"]
        ),
        st.sampled_from(["postfix", "postfix-b", SENT, "campaigns", ""]) | st.integers(0, 9),
    ),
)
def test_the_forward_input_makes_no_line_of_postfix(tag: str, record: dict[str, object]) -> None:
    """Whatever a process of the host sends becomes nothing, or a record of this host's agent, where all its records go."""
    configuration = load()
    passed = Pipeline(configuration).pass_through(outlet(configuration, "forward"), tag, record)
    if tag == "fairpost.agent":
        assert passed is not None
        assert passed == {
            **{name: value for name, value in record.items() if name != "partition"},
            "source": "agent",
            "instance": "postfix-a",
        }
    else:
        assert passed is None


def test_no_record_names_its_topic() -> None:
    """Kafka's topic is the configuration's: neither plugin nor buffer looks for one in a record."""
    output = Pipeline(load(FAIRPOST_DELIVERY_LOG_TOPIC="eu.delivery-log")).output
    assert output.parameters["topic"] == "eu.delivery-log"
    assert "default_topic" not in output.parameters
    assert output.one("buffer").argument == "tag"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FAIRPOST_INSTANCE", ""),
        ("FAIRPOST_INSTANCE", "-a"),
        ("FAIRPOST_INSTANCE", "a b"),
        ("FAIRPOST_INSTANCE", "a\n"),
        ("FAIRPOST_KAFKA_BOOTSTRAP_SERVERS", ""),
        ("FAIRPOST_KAFKA_BOOTSTRAP_SERVERS", "a:1, b:1"),
    ],
)
def test_what_has_no_default_must_be_set(name: str, value: str) -> None:
    """Fluentd does not start under a name of its own making, nor for a broker that nobody named."""
    with pytest.raises(ConfigurationError, match=f"^{name}: set it to "):
        load(**{name: value})


def test_no_failed_emit_is_swallowed() -> None:
    """With a <label @ERROR> the position in the log would move past lines that are not stored."""
    assert {label.argument for label in load().all("label")} == {
        "@POSTFIX",
        "@AGENT",
        "@DELIVERY_LOG",
    }


def test_all_kept_logs_are_followed_oldest_first() -> None:
    """Fluentd follows each file that logrotate keeps, so a rotation while it is down loses nothing."""
    paths = load(FAIRPOST_POSTFIX_LOG="/var/log/p.log").one("source", "tail").parameters["path"]
    kept = [f"/var/log/p.log.{number}" for number in range(KEPT_LOGS, 0, -1)]
    assert [path.strip() for path in paths.split(",")] == [*kept, "/var/log/p.log"]
    logrotate = (DEPLOY / "logrotate").read_text()
    assert re.search(r"^ +rotate (\d+)$", logrotate, re.MULTILINE)[1] == str(KEPT_LOGS)  # type: ignore[index]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("  follow_inodes true\n", "", "only follow_inodes true is understood"),
        ("read_from_head true", "read_from_head false", "only read_from_head true is understood"),
        ("retry_forever true", "retry_max_times 3", "retry_max_times is not understood"),
        ("overflow_action block", "overflow_action drop_oldest_chunk", "only overflow_action bl"),
        ("workers 1", "workers 2", "only workers 1 is understood"),
        ("@type json", "@type csv", "<format> of @type csv is not understood"),
        (
            "    idempotent true\n",
            "    idempotent true\n    max_send_limit_bytes 1m\n",
            "max_send_",
        ),
        ('.scrub("?")}\n', ".upcase}\n", "is not understood"),
        ("@label @DELIVERY_LOG", "@label @NOWHERE", "there is no <label @NOWHERE>"),
        ("<match fairpost.agent>", "<match fairpost.{agent,x}>", "only one pattern of names"),
        ("|| '24224'", "|| hostname", "are understood: "),
        ("<label @AGENT>", "<label @ERROR>\n</label>\n<label @AGENT>", "it swallows"),
    ],
)
def test_what_the_stand_in_does_not_do_is_an_error(old: str, new: str, complaint: str) -> None:
    """A parameter, value, plugin or expression that it would have to ignore is refused."""
    assert old in TEXT
    with pytest.raises(ConfigurationError, match=re.escape(complaint)):
        Pipeline(load(TEXT.replace(old, new))).pass_through("@AGENT", "fairpost.agent", {})


@pytest.mark.parametrize(
    "literal",
    [
        r"/\h/",
        r"/\Z/",
        r"/\p{Alpha}/",
        "/[[:alpha:]]/",
        "/a{2}+/",
        "/(?m:.)/",
        "/[a&&b]/",
        "a",
        "/a",
    ],
)
def test_a_regexp_that_the_engines_read_differently_is_an_error(literal: str) -> None:
    """What Ruby's Onigmo has alone, or means otherwise, is not for fluent.conf."""
    with pytest.raises(ConfigurationError):
        to_regexp(literal)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("fairpost.*", ["fairpost.agent"], ["fairpost", "fairpost.agent.x", "xfairpost.agent"]),
        ("fairpost.**", ["fairpost", "fairpost.agent.x"], ["fairpostx.agent"]),
        ("**", ["any.thing", "any"], []),
        ("fairpost.agent", ["fairpost.agent"], ["fairpost-agent", "fairpost.agents"]),
    ],
)
def test_tags_match_as_in_fluentd(pattern: str, matching: list[str], others: list[str]) -> None:
    """`*` is one part of a tag, `**` any number of them."""
    assert all(tag_matches(pattern, tag) for tag in matching)
    assert not any(tag_matches(pattern, tag) for tag in others)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<match>", "<match> is not closed"),
        ("<match>\n</source>", "line 2: </source> closes nothing"),
        ("</match>", "line 1: </match> closes nothing"),
        ("@type", "line 1: not understood"),
    ],
)
def test_what_is_no_configuration_is_an_error(text: str, complaint: str) -> None:
    """The error says where."""
    with pytest.raises(ConfigurationError, match=re.escape(complaint)):
        parse(text, {})
