"""How commands speak to people: listings, one-line errors, exit codes, logs."""

import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct

from contract import console, printable
from contract.console import CommandError
from contract.given_files import LONGEST_LINE
from contract.settings import SettingsError

AT = datetime(2026, 5, 1, 8, 30, 15, 123456, UTC)


class Row(Struct, frozen=True):
    """A row of a listing."""

    name: str
    sent: int = 0
    at: datetime | None = None


# ------------------------------------------------------------------ listings


def test_json_is_one_array_of_all_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` gives one array in snake_case on standard output, whatever the table shows."""
    console.show([Row("a", 1, AT), Row("b\n[x]")], as_json=True, columns=["name"])
    out, err = capsys.readouterr()
    assert json.loads(out) == [
        {"name": "a", "sent": 1, "at": "2026-05-01T08:30:15.123456Z"},
        {"name": "b\n[x]", "sent": 0, "at": None},
    ]
    assert err == ""


def test_json_of_nothing_is_an_empty_array(capsys: pytest.CaptureFixture[str]) -> None:
    """A listing without rows is still JSON."""
    console.show([], as_json=True)
    assert json.loads(capsys.readouterr().out) == []


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """Names above, numbers to the right, times in UTC to the second, a dash for nothing."""
    console.show([Row("a", 5, AT), Row("bb", 1_000)], as_json=False)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "name  sent  at",
        "a        5  2026-05-01T08:30:15Z",
        "bb    1000  -",
    ]


def test_the_columns_of_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A table shows the columns that were asked for, in that order."""
    console.show([Row("a", 5)], as_json=False, columns=["sent", "name"])
    assert capsys.readouterr().out.split() == ["sent", "name", "5", "a"]


def test_a_table_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Without rows the asked columns are named; nothing breaks without them."""
    console.show([], as_json=False, columns=["name"])
    assert capsys.readouterr().out.split() == ["name"]
    console.show([], as_json=False)
    assert capsys.readouterr().out == ""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
    | st.sampled_from(["[/red]", "[bold]x[/bold]", ":smile:", "\x1b[31mx", "a\nb", "\x07"])
)
def test_what_data_says_is_shown_as_it_stands(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Neither markup nor control characters in data reach the terminal as such."""
    console.show([Row(name)], as_json=False, columns=["name"])
    out = capsys.readouterr().out
    assert not set(out) & {"\x1b", "\x07", "\x08", "\r", "\x0b"}
    if re.fullmatch(r"[!-~]+", name):
        assert name in out


HOSTILE = "a\x1b[31mb\x9b1mc\rd\u202ee\n2026-05-01T08:30:15.000Z INFO processor.tracking: forged"


@pytest.mark.parametrize(
    "say",
    [
        console.complain,
        console.tell,
        lambda text: console.show([Row(text)], as_json=False),
        lambda text: console.show_json(Row(text)),
    ],
    ids=["complain", "tell", "table", "json"],
)
def test_a_terminal_obeys_no_data(
    capsys: pytest.CaptureFixture[str], say: Callable[[str], None]
) -> None:
    """However a command says what data brought, control characters and line ends are escaped."""
    say(HOSTILE)
    said = "".join(capsys.readouterr())
    assert said.replace("\n", "").isprintable()
    assert not any(line.startswith("2026") for line in said.splitlines())


class Terminal(io.StringIO):
    """Where a person looks."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def test_octets_of_others(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """A file gets records as they are; a terminal line by line, escaped, also where they are no UTF-8."""
    octets = HOSTILE.encode() + b"\tz\xff\n"
    console.octets_out().write(octets)
    assert capsysbinary.readouterr().out == octets
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    assert console.octets_out().write(octets) == len(octets)
    assert terminal.getvalue() == printable.lines(HOSTILE) + "\tz\\xff\n"


# ------------------------------------------------------------------ files of rows


def test_no_line_fills_the_memory(tmp_path: Path) -> None:
    """A line has an end within bounds, or ends the command with its place: what came before it is read."""
    path = tmp_path / "image.csv"
    path.write_bytes(b"short\n" + b"a" * LONGEST_LINE + b"\nlast")
    told = re.escape(f"{path}: line 2 is over {LONGEST_LINE} bytes")
    with path.open("rb") as file, console.counted_lines(file) as lines:
        assert next(lines) == b"short\n"
        with pytest.raises(CommandError, match=f"^{told}$"):
            next(lines)
    path.write_bytes(b"a" * (LONGEST_LINE - 1) + b"\n\nlast")
    with path.open("rb") as file, console.counted_lines(file) as lines:
        assert [len(line) for line in lines] == [LONGEST_LINE, 1, 4]


# ------------------------------------------------------------------ errors and exit codes


class KnownError(Exception):
    """A failure that a command line expects."""


def outcome(
    run: Callable[[], object], capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[object, str]:
    """Exit code and standard error of a command that does this."""

    @click.command()
    @click.pass_context
    def command(context: click.Context) -> None:
        context.exit(run() or 0)  # type: ignore[arg-type]  # what a test answers is a code

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["x", *arguments])
        patch.setattr(sys.modules["__main__"], "__package__", None)
        with pytest.raises(SystemExit) as ended:
            console.run(command, (KnownError,))
    return ended.value.code, capsys.readouterr().err


def raising(error: BaseException) -> Callable[[], object]:
    """What fails in this way."""

    def run() -> object:
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "code", "said"),
    [
        (lambda: None, 0, ""),
        (lambda: 0, 0, ""),
        (lambda: 1, 1, ""),
        (raising(CommandError("what to do")), 1, "what to do\n"),
        (raising(KnownError("first\nsecond")), 1, "first\n"),
        (raising(KnownError()), 1, "KnownError\n"),
        (raising(SettingsError("database: is not set")), 2, "database: is not set\n"),
        (raising(click.Abort()), 130, ""),
        (raising(KeyboardInterrupt()), 130, "\n"),
    ],
)
def test_exit_codes(
    capsys: pytest.CaptureFixture[str], run: Callable[[], object], code: int, said: str
) -> None:
    """0 done, 1 failed, 2 wrong configuration, 130 interrupted; an error is one line on standard error."""
    assert outcome(run, capsys) == (code, said)


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """An option that is none is wrong usage, code 2, and the usage is shown."""
    code, said = outcome(lambda: None, capsys, "--nonsense")
    assert code == 2
    assert said.startswith("Usage: x ")
    assert "No such option: --nonsense" in said


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody expected is not made to look like the user's mistake."""

    @click.command()
    def command() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("sys.argv", ["x"])
    with pytest.raises(ZeroDivisionError):
        console.run(command, (KnownError,))


def test_a_traceback_obeys_no_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash is told line by line, in full, and nothing of its error's text is obeyed by a terminal."""

    @click.command()
    def command() -> None:
        raise ZeroDivisionError(HOSTILE)

    monkeypatch.setattr("sys.argv", ["x"])
    with pytest.raises(ZeroDivisionError) as crash:
        console.run(command, (KnownError,))
    sys.excepthook(crash.type, crash.value, crash.tb)
    told = capsys.readouterr().err
    assert told.startswith("Traceback (most recent call last):\n")
    assert "ZeroDivisionError: a\\x1b[31mb\\x9b1mc\\rd\\u202ee\n" in told
    assert told.replace("\n", "").isprintable()


# ------------------------------------------------------------------ logs and completion


@pytest.fixture(autouse=True)
def hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """How a crash is told, put back as it was."""
    monkeypatch.setattr("sys.excepthook", sys.excepthook)


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, put back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    # basicConfig closes what it takes away: pytest's own handlers must not be there.
    root.handlers.clear()
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def far_east(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose clock is not on UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("far_east")
def test_logs_are_lines_with_times_in_utc(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process logs one line an event on standard error, from its level on."""
    console.log_to_stderr("WARNING")
    root_logger.info("not told")
    record = logging.LogRecord("a.b", logging.WARNING, "", 0, "told %d", (5,), None)
    record.created, record.msecs = 0.0, 7.0
    root_logger.handle(record)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "1970-01-01T00:00:00.007Z WARNING a.b: told 5\n")


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize(
    ("level", "priority"),
    [("DEBUG", 7), ("INFO", 6), ("WARNING", 4), ("ERROR", 3), ("CRITICAL", 2)],
)
def test_lines_of_the_journal_have_a_priority(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: str, priority: int
) -> None:
    """Where standard error is the journal, each line, of a traceback too, has the priority of its event."""
    stream = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{stream.st_dev}:{stream.st_ino}")
    console.log_to_stderr("DEBUG")
    logging.getLogger("a.b").log(logging.getLevelName(level), "told", stack_info=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert all(line.startswith(f"<{priority}>") for line in lines)


@pytest.mark.usefixtures("root_logger")
def test_a_file_is_no_journal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was started from a service, and writes elsewhere, tells no priorities."""
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    console.log_to_stderr("INFO")
    logging.getLogger("a.b").warning("told")
    assert not capsys.readouterr().err.startswith("<")


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize("crash", [False, True], ids=["told", "crashed"])
def test_no_data_forges_a_line_of_a_log(capsys: pytest.CaptureFixture[str], *, crash: bool) -> None:
    """What an event brought is part of its own line; a traceback after it is whole, and indented."""
    console.log_to_stderr("INFO")
    logger = logging.getLogger("processor.tracking")
    try:
        raising(ValueError(HOSTILE))()
    except ValueError as error:
        if crash:
            logger.exception("ended", stack_info=True)
        else:
            logger.warning("a reply: %s", error)
    first, *others = capsys.readouterr().err.splitlines()
    assert re.match(r"\d{4}-\d\d-\d\dT[0-9:.]+Z (ERROR|WARNING) processor\.tracking: ", first)
    assert (first + "".join(others)).isprintable()
    assert all(line.startswith("  ") for line in others)
    assert bool(others) == crash
    assert not crash or "  Traceback (most recent call last):" in others


@pytest.mark.parametrize(
    ("program", "shell", "line"),
    [
        ("fairpost", "bash", 'eval "$(_FAIRPOST_COMPLETE=bash_source fairpost)"'),
        ("fairpost", "zsh", 'eval "$(_FAIRPOST_COMPLETE=zsh_source fairpost)"'),
        (
            "fairpost-agent",
            "bash",
            'eval "$(_FAIRPOST_AGENT_COMPLETE=bash_source fairpost-agent)"',
        ),
        (
            "fairpost-agent",
            "fish",
            "_FAIRPOST_AGENT_COMPLETE=fish_source fairpost-agent | source",
        ),
    ],
)
def test_the_line_of_completion(program: str, shell: str, line: str) -> None:
    """Each shell is told in its own words, under the variable that click reads."""
    assert console.completion(program, shell) == line


@pytest.mark.usefixtures("root_logger")
def test_a_library_says_the_same_once_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    """What a library repeats during an outage is one line; what we say is never held back."""
    console.log_to_stderr("INFO")
    for number in range(5):
        logging.getLogger("aiokafka.conn").error("no connection to %s\n(try %d)", "kafka", number)
        logging.getLogger("contract.outage").warning("try %d", number)
    lines = capsys.readouterr().err.splitlines()
    assert sum("no connection to kafka (try 0)" in line for line in lines) == 1
    assert sum("aiokafka.conn" in line for line in lines) == 1
    assert sum("contract.outage" in line for line in lines) == 5
