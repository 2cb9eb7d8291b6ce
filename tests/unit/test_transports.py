"""The transports of operators: their bounds follow from the limit, and only what is fairpost's is read and changed."""

import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.operators import OTHER, Operator
from contract.transport_settings import (
    MASTER_SETTINGS,
    RESERVED_NAMES,
    SMTP_PARAMETERS,
    TRANSPORT_PARAMETERS,
    TransportError,
    check_transport,
)
from smtp_agent.transports import (
    DELIVERY_SECONDS,
    LEAST_PROCESSES,
    MOST_PROCESSES,
    Change,
    Transports,
    differences,
    make_transports,
    processes,
    rate_delay,
    read_parameters,
    read_routes,
    read_services,
    write_routes,
)

DEPLOY = Path(__file__).parents[2] / "deploy" / "postfix"
TAG = "${multi_instance_name?{$multi_instance_name}:{postfix}}/$fairpost_operator"

limits = st.integers(1, 60_000)
names = st.sampled_from(["gmail", "outlook", "web_de", "o2", "a", "x_y_z"])
domains = st.sampled_from(["gmail.com", "a.example", "xn--kln-sna.example", "b-c.d.test", "o2.pl"])
operators = st.lists(
    st.builds(
        Operator,
        names,
        st.lists(domains, min_size=1, max_size=3).map(tuple),
        st.none() | limits,
        transport=st.fixed_dictionaries(
            {},
            optional={
                "maxproc": st.integers(1, 900),
                "nexthop": st.sampled_from(["[127.0.0.1]:25", "relay.example"]),
                "destination_concurrency_limit": st.integers(1, 900),
                "smtp_connect_timeout": st.sampled_from(["5s", 30]),
            },
        ),
    ),
    unique_by=lambda operator: operator.name,
    max_size=4,
)


# ------------------------------------------------------------------ bounds


@given(limits)
def test_processes_keep_up_with_the_limit(limit: int) -> None:
    """So many deliveries of two seconds are the limit, one fewer are not; at least two and at most 500."""
    number = processes(limit)
    assert LEAST_PROCESSES <= number <= MOST_PROCESSES
    assert number * 60 >= limit * DELIVERY_SECONDS or number == MOST_PROCESSES
    assert (number - 1) * 60 < limit * DELIVERY_SECONDS or number == LEAST_PROCESSES


@pytest.mark.parametrize(
    ("limit", "number"), [(1, 2), (60, 2), (61, 3), (350, 12), (6_000, 200), (60_000, 500)]
)
def test_processes_of_some_limits(limit: int, number: int) -> None:
    """Twice the messages of a second."""
    assert processes(limit) == number


@given(limits)
def test_a_rate_delay_leaves_room_for_the_limit(limit: int) -> None:
    """With the delay more than the limit go out at two seconds each; with a second more they would not."""
    delay = rate_delay(limit)
    assert (delay > 0) == (limit * (1 + DELIVERY_SECONDS) < 60)
    if delay:
        assert limit * (delay + DELIVERY_SECONDS) < 60
        assert limit * (delay + 1 + DELIVERY_SECONDS) >= 60


@pytest.mark.parametrize(("limit", "delay"), [(1, 57), (6, 7), (10, 3), (19, 1), (20, 0), (60, 0)])
def test_rate_delays_of_some_limits(limit: int, delay: int) -> None:
    """Whole seconds, which fit small limits only."""
    assert rate_delay(limit) == delay


# ------------------------------------------------------------------ transports


def test_an_operator_has_service_parameters_and_routes() -> None:
    """All that follows from a limit of 350, with two domains."""
    gmail = Operator("gmail", ("gmail.com", "googlemail.com"), 350)
    assert make_transports([gmail]) == Transports(
        {
            "gmail": f"gmail unix - - n - 12 smtp -o fairpost_operator=gmail -o syslog_name={TAG}",
        },
        {"gmail_destination_concurrency_limit": "12", "gmail_destination_recipient_limit": "50"},
        {"gmail.com": "gmail:", "googlemail.com": "gmail:"},
    )


def test_a_small_limit_has_a_rate_delay() -> None:
    """Ten a minute: one in three seconds and what it takes."""
    parameters = make_transports([Operator("slow", ("slow.example",), 10)]).parameters
    assert parameters["slow_transport_rate_delay"] == "3s"
    assert parameters["slow_destination_concurrency_limit"] == "2"


def test_other_has_the_rest_of_the_world() -> None:
    """It names no domains; without a limit the host's own bounds hold."""
    transports = make_transports([Operator(OTHER)])
    assert transports.routes == {"*": "other:"}
    assert transports.services["other"].startswith("other unix - - n - - smtp ")
    assert transports.parameters == {"other_destination_recipient_limit": "50"}


def test_settings_go_before_what_follows_from_the_limit() -> None:
    """Each setting is where it belongs: maxproc, `-o`, main.cf, next hop."""
    settings: dict[str, str | int] = {
        "smtp_rcpt_timeout": "30s",
        "maxproc": 7,
        "smtp_connect_timeout": 10,
        "transport_rate_delay": "0s",
        "destination_rate_delay": "2s",
        "nexthop": "[relay.example]:587",
    }
    transports = make_transports([Operator("slow", ("slow.example",), 10, transport=settings)])
    assert transports == Transports(
        {
            "slow": f"slow unix - - n - 7 smtp -o fairpost_operator=slow -o syslog_name={TAG}"
            " -o smtp_connect_timeout=10 -o smtp_rcpt_timeout=30s",
        },
        {
            "slow_destination_concurrency_limit": "7",
            "slow_destination_rate_delay": "2s",
            "slow_destination_recipient_limit": "50",
            "slow_transport_rate_delay": "0s",
        },
        {"slow.example": "slow:[relay.example]:587"},
    )


@pytest.mark.parametrize("name", ["smtp", "default", "qmgr", "discard"])
def test_names_that_a_transport_cannot_have(name: str) -> None:
    """Postfix's own services, and `default`, whose parameters hold for all, are refused."""
    with pytest.raises(TransportError, match=rf"^operator '{name}': Postfix has a service"):
        make_transports([Operator(name, ("a.example",))])


def test_the_names_of_deployed_services_are_reserved() -> None:
    """No operator can take a service of deploy/postfix/master.cf or of Postfix's own master.cf."""
    texts = [(DEPLOY / "master.cf").read_text()]
    texts += [path.read_text() for path in [Path("/etc/postfix/master.cf.proto")] if path.exists()]
    services = re.findall(
        r"^#?([a-z][a-z0-9_]*)\s+(?:unix|inet|unix-dgram)\s", "\n".join(texts), re.MULTILINE
    )
    assert {"smtp", "relay", "error"} <= set(services)
    assert [name for name in services if not RESERVED_NAMES.fullmatch(name)] == []


def test_two_operators_with_one_parameter() -> None:
    """Names that Postfix cannot tell apart, as a parameter of one is that of another, are refused."""
    one = Operator("a", ("a.example",), transport={"initial_destination_concurrency": 3})
    other = Operator("a_initial", ("b.example",))
    assert make_transports([one, other]).parameters["a_initial_destination_concurrency"] == "3"
    clash = Operator("a", ("a.example",), transport={"destination_recipient_limit": 9})
    with pytest.raises(TransportError, match="a_destination_recipient_limit is a parameter of"):
        make_transports([clash, Operator("a", ("b.example",))])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"syslog_name": "x"}, "transport has no setting 'syslog_name'; it has destination_"),
        ({"maxproc": 0}, "transport.maxproc: not 0"),
        ({"maxproc": "5\n"}, r"transport.maxproc: not '5\\n'"),
        ({"nexthop": "[a]:1 -o x=y"}, "transport.nexthop: not "),
        ({"nexthop": "a\nb"}, r"transport.nexthop: not 'a\\nb'"),
        ({"destination_recipient_limit": 1}, "transport.destination_recipient_limit: not 1"),
        ({"smtp_helo_timeout": "$x"}, r"transport.smtp_helo_timeout: not '\$x'"),
        ({"smtp_tls_security_level": "sometimes"}, "transport.smtp_tls_security_level: not"),
        ({"destination_concurrency_negative_feedback": "1/x"}, "feedback: not '1/x'"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, str | int], said: str) -> None:
    """What is unknown or ill-formed is told in one line, with operator and setting."""
    with pytest.raises(TransportError, match=said) as refusal:
        make_transports([Operator("gmail", ("gmail.com",), transport=settings)])
    assert str(refusal.value).startswith("operator 'gmail': ")
    assert "\n" not in str(refusal.value)


@given(
    st.sampled_from([*MASTER_SETTINGS, *TRANSPORT_PARAMETERS, *SMTP_PARAMETERS]),
    st.text() | st.text("0123456789smhd/.concurety_[]:$ \n", max_size=12) | st.integers(),
)
def test_no_value_adds_a_line_a_word_or_a_macro(name: str, value: str | int) -> None:
    """A value that passes is one word without `$`: it cannot say more than its setting."""
    with suppress(TransportError):
        check_transport("gmail", {name: value})
        assert re.fullmatch(r"[A-Za-z0-9./:_\[\]-]+", str(value), re.ASCII)


# ------------------------------------------------------------------ reading and comparing


FOREIGN = """\
smtp       inet  n       -       n       -       -       smtpd
smtp       unix  -       -       n       -       -       smtp
mine       unix  -       -       n       -       5       smtp -o syslog_name=postfix/mine
copied     unix  -       -       n       -       5       smtp -o fairpost_operator=gmail -o x=y
"""


@given(operators)
def test_what_was_made_is_read_again(made: list[Operator]) -> None:
    """From Postfix's listings, among what is a person's, exactly the operators' transports are read."""
    wanted = make_transports(made)
    services, others = read_services(FOREIGN + "".join(f"{e}\n" for e in wanted.services.values()))
    assert services == wanted.services
    assert others - services.keys() == {"smtp", "mine", "copied"} - services.keys()
    listing = "smtp_destination_rate_delay = 1s\nmynetworks = 127.0.0.0/8\n"
    listing += "".join(f"{n} = {v}\n" for n, v in wanted.parameters.items())
    assert read_parameters(listing, services) == wanted.parameters
    assert read_routes(write_routes(wanted.routes)) == wanted.routes
    assert differences(wanted, wanted) == []


@given(operators, operators)
def test_changes_lead_from_one_to_the_other(before: list[Operator], after: list[Operator]) -> None:
    """Applied to what is there, the differences give what is wanted, and each changes something."""
    now, wanted = make_transports(before), make_transports(after)
    changes = differences(now, wanted)
    assert all(change.before != change.after for change in changes)
    for file, have, want in (
        ("master.cf", now.services, wanted.services),
        ("main.cf", now.parameters, wanted.parameters),
        ("operators", now.routes, wanted.routes),
    ):
        result = dict(have)
        for change in (c for c in changes if c.file == file):
            assert result.pop(change.name, None) == change.before
            if change.after is not None:
                result[change.name] = change.after
        assert result == want


def test_differences_are_in_order() -> None:
    """File by file, and by name; what is new has no before, what goes no after."""
    now = make_transports([Operator("gmail", ("gmail.com",), 350)])
    wanted = make_transports([Operator("gmail", ("googlemail.com",), 60)])
    limit = "gmail_destination_concurrency_limit"
    rest = f"smtp -o fairpost_operator=gmail -o syslog_name={TAG}"
    assert differences(now, wanted) == [
        Change(
            "master.cf", "gmail", f"gmail unix - - n - 12 {rest}", f"gmail unix - - n - 2 {rest}"
        ),
        Change("main.cf", limit, "12", "2"),
        Change("operators", "gmail.com", "gmail:", None),
        Change("operators", "googlemail.com", None, "gmail:"),
    ]


def test_a_table_of_a_persons() -> None:
    """Comments and empty lines are no routes."""
    assert read_routes("# gmail.com gmail:\n\n  \na.example   b:[c]:25  \n") == {
        "a.example": "b:[c]:25"
    }
