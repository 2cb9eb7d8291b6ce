"""Both command lines: first steps, exit codes, and one line for each mistake."""

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import click
import pytest
from click.testing import CliRunner

import processor.cli
import smtp_agent.cli
from contract import settings as settings_module
from contract.given_files import MAXIMUM

PROGRAMS: dict[str, tuple[click.Group, Callable[[], NoReturn]]] = {
    "fairpost": (processor.cli.cli, processor.cli.main),
    "fairpost-agent": (smtp_agent.cli.cli, smtp_agent.cli.main),
}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings but those of a test."""
    for name in os.environ:
        if name.upper().startswith("FAIRPOST_") or name.upper() == "SEND_EMAIL":
            monkeypatch.delenv(name)
    monkeypatch.setattr(settings_module, "DEFAULT_FILE", tmp_path / "none.toml")


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Runs a program as its entry point does; answers its exit code."""
    monkeypatch.setattr("sys.argv", list(words))
    # As a script that is on PATH, not as a module of this test run's.
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)
    with pytest.raises(SystemExit) as ended:
        PROGRAMS[words[0]][1]()
    assert isinstance(ended.value.code, int)
    return ended.value.code


# ------------------------------------------------------------------ help


@pytest.mark.parametrize("program", PROGRAMS)
def test_first_steps(program: str) -> None:
    """The help of a program begins with what to do first, and names only commands that there are."""
    cli = PROGRAMS[program][0]
    _, mark, steps = (cli.help or "").partition("First steps")
    assert mark
    for line in steps.splitlines()[1:]:
        words = line.split()
        if words[:1] == [program]:
            assert words[1] in cli.commands


@pytest.mark.parametrize("program", PROGRAMS)
def test_version(program: str) -> None:
    """Both programs say which version they are."""
    told = CliRunner().invoke(PROGRAMS[program][0], ["--version"], prog_name=program)
    assert told.output == f"{program}, version {version('fairpost')}\n"


# ------------------------------------------------------------------ wrong usage


@pytest.mark.parametrize(
    "words",
    [
        ("fairpost",),
        ("fairpost", "nonsense"),
        ("fairpost", "--nonsense"),
        ("fairpost", "topics"),
        ("fairpost", "topics", "create", "--partitions", "0"),
        ("fairpost", "topics", "create", "--partitions", "many"),
        ("fairpost", "publish", "campaign"),
        ("fairpost", "publish", "due-emails", "/nonexistent.csv"),
        ("fairpost", "publish", "due-emails", "-", "--format", "xml"),
        ("fairpost", "campaigns", "show"),
        ("fairpost", "campaigns", "show", "a", "b"),
        ("fairpost", "campaigns", "list", "--sort", "colour"),
        ("fairpost", "campaigns", "show", "--watch", "spring"),
        ("fairpost", "status", "now"),
        ("fairpost", "campaigns", "preview"),
        ("fairpost", "campaigns", "preview", "spring.toml"),
        ("fairpost", "campaigns", "test", "spring.toml"),
        ("fairpost", "campaigns", "test", "a", "--to", "a@b.test", "--timeout", "-1"),
        ("fairpost", "campaigns", "retry-rejected"),
        ("fairpost", "campaigns", "retry-rejected", "a", "--json"),
        ("fairpost", "sending"),
        ("fairpost", "sending", "maybe"),
        ("fairpost", "dispatches"),
        ("fairpost", "dispatches", "ann", "ben"),
        ("fairpost", "dispatches", "--unplanned", "--older-than", "-1"),
        ("fairpost", "dead-letters", "show"),
        ("fairpost", "dead-letters", "show", "17"),
        ("fairpost", "dead-letters", "republish"),
        ("fairpost", "log"),
        ("fairpost", "log", "explain"),
        ("fairpost", "log", "explain", "4711", "4712"),
        ("fairpost", "log", "explain", "4711", "--limit", "0"),
        ("fairpost", "suppressions"),
        ("fairpost", "suppressions", "add"),
        ("fairpost", "suppressions", "add", "nobody"),
        ("fairpost", "suppressions", "import", "/nonexistent.csv"),
        ("fairpost", "suppressions", "check"),
        ("fairpost", "completion", "tcsh"),
        ("fairpost-agent",),
        ("fairpost-agent", "run", "now"),
        ("fairpost-agent", "completion"),
    ],
    ids=" ".join,
)
def test_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """Wrong usage is exit code 2, and what is right is shown on standard error."""
    assert run(monkeypatch, *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"Usage: {words[0]} ")


# ------------------------------------------------------------------ settings

NEED_SETTINGS = [
    ("fairpost", "worker"),
    ("fairpost", "tracker"),
    ("fairpost", "migrate"),
    ("fairpost", "migrate", "--check"),
    ("fairpost", "topics", "create"),
    ("fairpost", "topics", "check"),
    ("fairpost", "topics", "accept", "--yes"),
    ("fairpost", "operators", "list"),
    ("fairpost", "operators", "pause", "gmail"),
    ("fairpost", "instances", "list"),
    ("fairpost", "instances", "retire", "a"),
    ("fairpost", "uncertain", "list"),
    ("fairpost", "uncertain", "drop", "1", "--yes"),
    ("fairpost", "suppressions", "add", "ann@shop.test"),
    ("fairpost", "suppressions", "import", "-"),
    ("fairpost", "suppressions", "list"),
    ("fairpost", "suppressions", "check", "ann@shop.test"),
    ("fairpost", "publish", "due-emails", "-"),
    ("fairpost", "campaigns", "list", "--json"),
    ("fairpost", "campaigns", "show", "spring"),
    ("fairpost", "campaigns", "pause", "spring"),
    ("fairpost", "campaigns", "resume", "spring"),
    ("fairpost", "campaigns", "cancel", "spring", "--yes"),
    ("fairpost", "sending", "off"),
    ("fairpost", "sending", "on"),
    ("fairpost", "sending", "status"),
    ("fairpost", "status"),
    ("fairpost", "status", "--watch"),
    ("fairpost", "dispatches", "ann"),
    ("fairpost", "dispatches", "--unplanned", "--json"),
    ("fairpost", "dead-letters", "list"),
    ("fairpost", "dead-letters", "show", "0:17"),
    ("fairpost", "dead-letters", "republish", "0:17", "--yes"),
    ("fairpost", "audit"),
    ("fairpost", "campaigns", "retry-rejected", "spring", "--yes"),
    ("fairpost", "campaigns", "preview", "spring", "--to", "ann@shop.test"),
    ("fairpost", "campaigns", "test", "spring", "--to", "ann@shop.test"),
    ("fairpost", "log", "explain", "4711"),
    ("fairpost", "log", "explain", "ann@shop.example", "--json"),
    ("fairpost-agent", "run"),
    ("fairpost-agent", "check"),
    ("fairpost-agent", "status"),
    ("fairpost-agent", "drain"),
]


@pytest.mark.parametrize("words", NEED_SETTINGS, ids=" ".join)
def test_missing_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """A command that needs settings says in one line which are missing, and where they go."""
    assert run(monkeypatch, *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    table = "processor" if words[0] == "fairpost" else "agent"
    assert len(err.splitlines()) == 1
    assert (
        f"database: is not set; put it into [{table}] of the settings file or into"
        " FAIRPOST_DATABASE" in err
    )


@pytest.mark.parametrize("words", NEED_SETTINGS, ids=" ".join)
def test_wrong_settings(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: tuple[str, ...],
) -> None:
    """A setting that is none is told in one line; the file may be named by option or variable."""
    table = "processor" if words[0] == "fairpost" else "agent"
    file = tmp_path / "fairpost.toml"
    file.write_text(
        "[processor]\ndatabase = 'password=secret'\nkafka_bootstrap_servers = 'k'\nx = 1\n"
        "[agent]\ndatabase = 'password=secret'\ninstance = 'a'\nbounce_domain = 'b.test'\nx = 1\n"
    )
    program, *rest = words
    assert run(monkeypatch, program, "--config", str(file), *rest) == 2
    by_option = capsys.readouterr()
    monkeypatch.setenv("FAIRPOST_CONFIG", str(file))
    assert run(monkeypatch, *words) == 2
    assert capsys.readouterr() == by_option == ("", f"x: no such setting in [{table}]\n")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_settings_file_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str
) -> None:
    """A file that was named must be there."""
    command = "worker" if program == "fairpost" else "run"
    assert run(monkeypatch, program, "--config", "/nonexistent.toml", command) == 2
    assert capsys.readouterr().err == "/nonexistent.toml: no such file\n"


# ------------------------------------------------------------------ failures


def test_files_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A file that is missing or wrong is told in one line with its name, exit code 1, before any service is asked."""
    monkeypatch.setenv("FAIRPOST_DATABASE", "dbname=x")
    monkeypatch.setenv("FAIRPOST_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    file = tmp_path / "a.toml"
    for text, complaint in (
        (None, f"{file}: No such file or directory\n"),
        ("x", f"{file}: Expected '=' after a key in a key/value pair (at end of document)\n"),
    ):
        if text is not None:
            file.write_text(text)
        for words in (("publish", "campaign"), ("operators", "apply")):
            assert run(monkeypatch, "fairpost", *words, str(file)) == 1
            assert capsys.readouterr() == ("", complaint)
    file.write_text('campaign_id = "spring"\n')
    assert run(monkeypatch, "fairpost", "publish", "campaign", str(file)) == 1
    assert capsys.readouterr().err == f"{file}: campaigns: Object missing required field `name`\n"


DEEP = b"[" * 100_000

HOSTILE_FILES = {
    "arrays": DEEP,
    "x-arrays": b"x = " + DEEP,
    "tables": b"x = " + b"{a=" * 100_000,
    "keys": b".".join([b"a"] * 3_000) + b" = 1",
    "objects": b'{"a":' * 100_000,
    "number": b"x = " + b"9" * 5_000,
    "json-number": b'{"x":' + b"9" * 5_000 + b"}",
    "binary": bytes(range(256)),
    "utf-16": 'campaign_id = "c"'.encode("utf-16"),
    "nul": b'x = "\x00"',
    "escape": b'"\\u001b[2J" = 1\n"\\u001b[2J" = 1',
    "json-escape": b'{"type":"\\u001b[2J\\u202e\\n"}',
    "large": b" " * (MAXIMUM + 1),
}


@pytest.mark.parametrize("suffix", ["toml", "json"])
@pytest.mark.parametrize("octets", HOSTILE_FILES.values(), ids=HOSTILE_FILES)
def test_hostile_files(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    octets: bytes,
    suffix: str,
) -> None:
    """Whatever stands in a file that a command reads whole, it is refused in one line that a terminal can show."""
    file = tmp_path / f"a.{suffix}"
    file.write_bytes(octets)
    for words, code in (
        (("publish", "campaign", str(file)), 1),
        (("operators", "apply", str(file)), 1),
        (("--config", str(file), "campaigns", "list"), 2),
    ):
        assert run(monkeypatch, "fairpost", *words) == code
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith((f"{file}: ", "database: is not set"))
        assert err[:-1].isprintable()


def test_a_database_that_is_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A command that cannot connect says so in one line, without the password, exit code 1."""
    monkeypatch.setenv("FAIRPOST_DATABASE", f"host={tmp_path} user=u password=secret dbname=x")
    monkeypatch.setenv("FAIRPOST_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    assert run(monkeypatch, "fairpost", "campaigns", "list") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("database: ")
    assert "secret" not in err


@pytest.mark.parametrize("answer", ["n\n", "\n", ""])
def test_a_cancellation_is_asked_for(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """What is final asks first, on standard error, and a closed input is no yes."""
    monkeypatch.setenv("FAIRPOST_DATABASE", "host=/nonexistent")
    monkeypatch.setenv("FAIRPOST_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    told = CliRunner().invoke(processor.cli.cli, ["campaigns", "cancel", "spring"], input=answer)
    assert told.exit_code == 1
    assert "Cancel spring for good? [y/N]" in told.stderr
    assert "database" not in told.stderr


# ------------------------------------------------------------------ completion


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str, shell: str
) -> None:
    """The printed line sets the variable under which the program answers its shell with a script."""
    assert run(monkeypatch, program, "completion", shell) == 0
    line = capsys.readouterr().out
    assert program in line
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    assert f"{variable}={shell}_source" in line


@pytest.mark.parametrize("program", PROGRAMS)
def test_completion_is_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str
) -> None:
    """Asked as a shell asks, the program lists its commands."""
    monkeypatch.setenv(f"_{program.upper().replace('-', '_')}_COMPLETE", "zsh_complete")
    monkeypatch.setenv("COMP_WORDS", f"{program} ")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert run(monkeypatch, program) == 0
    assert set(PROGRAMS[program][0].commands) <= set(capsys.readouterr().out.split())
