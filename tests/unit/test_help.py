"""The help of both command lines: of man-page quality, with examples that work, and the reference made of it."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import processor.cli
import smtp_agent.cli
from contract.help import commands, help_of
from contract.operators import load_operators
from docs.commands import FILE, text
from processor.campaign_files import read_campaign_file
from processor.campaigns import read_campaign_event

PROGRAMS: dict[str, click.Group] = {
    "fairpost": processor.cli.cli,
    "fairpost-agent": smtp_agent.cli.cli,
}
ALL = [
    pytest.param(path, command, id=" ".join(path))
    for name, program in PROGRAMS.items()
    for path, command in commands(program, (name,))
]
LEAVES = [one for one in ALL if not isinstance(one.values[1], click.Group)]

_EXAMPLES = re.compile(r"^Examples?:(?: (.+)|((?:\n  .+)+))", re.MULTILINE)
_ENDS = {"|", "||", "&&", ">", ">>", ";"}


def examples(command: click.Command) -> list[str]:
    """The example lines of a command's help."""
    told = cleandoc(command.help or "").replace("\b\n", "")
    return [
        line.strip()
        for one, several in _EXAMPLES.findall(told)
        for line in (one or several).splitlines()
        if line.strip()
    ]


def calls(line: str) -> Iterator[list[str]]:
    """The words of each command of a shell line that is one of our programs."""
    lexer = shlex.shlex(line.partition("     (")[0], posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    call: list[str] = []
    for word in [*lexer, ";"]:
        if word in _ENDS:
            while call and re.fullmatch(r"[A-Z_]+=.*", call[0]):
                call.pop(0)
            if call and call[0] in PROGRAMS:
                yield call
            call = []
        else:
            call.append(word)


def parse(words: list[str]) -> tuple[str, ...]:
    """Parses the words with the parsers of the program, as running it would; answers which command it is.

    Raises:
        click.UsageError: running it would be wrong usage.
    """
    command: click.Command = PROGRAMS[words[0]]
    path, rest, parent = [words[0]], words[1:], None
    while True:
        context = command.make_context(path[-1], list(rest), parent=parent)
        if not isinstance(command, click.Group):
            context.close()  # the files that it opened
            return tuple(path)
        name, found, rest = command.resolve_command(
            context,
            [*context._protected_args, *context.args],  # noqa: SLF001  as Group.invoke does
        )
        assert name is not None
        assert found is not None
        path.append(name)
        command, parent = found, context


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that examples name."""
    for name in ("mail.log", "mail.log.1", "contacts.csv", "unsubscribed.csv"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("path", "command"), ALL)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_of_every_command(path: tuple[str, ...], command: click.Command, option: str) -> None:
    """Help needs no settings and no service, says what the command does, what each option is for, and the exit codes."""
    told = CliRunner().invoke(PROGRAMS[path[0]], [*path[1:], option], prog_name=path[0])
    assert told.exit_code == 0, told.output
    assert told.stdout.startswith(f"Usage: {' '.join(path)} ")
    assert "Exit codes: 0 done, 1 failed, 2 wrong usage or configuration" in told.stdout
    assert told.stderr == ""
    assert command.help
    assert cleandoc(command.help).partition("\n")[0].endswith(".")
    for parameter in command.params:
        assert not isinstance(parameter, click.Option) or parameter.help, parameter.name


@pytest.mark.parametrize(("path", "command"), LEAVES)
def test_every_command_has_examples_that_work(
    path: tuple[str, ...], command: click.Command
) -> None:
    """Each example is a line that the command's own parser takes, and one at least is of the command itself."""
    shown = [parse(call) for line in examples(command) for call in calls(line)]
    assert path in shown
    for line in examples(command):
        assert list(calls(line)) or "=" in line or line.startswith("["), f"no command: {line}"


def test_an_example_that_does_not_work_is_found() -> None:
    """The test above sees wrong options, wrong values, missing files and unknown commands."""
    for line in (
        "fairpost campaigns show spring --jsno",
        "fairpost dispatches --unplanned --older-than soon",
        "cat x | fairpost suppressions import nobody.csv",
        "fairpost campaign show spring",
        "fairpost campaigns show",
    ):
        [call] = calls(line)
        with pytest.raises(click.UsageError):
            parse(call)


def file_example(command: click.Command) -> str:
    """The file that a command's help shows."""
    return cleandoc((command.help or "").partition("Example of a file:\n")[2])


@pytest.mark.parametrize(("path", "command"), ALL)
def test_choices_are_the_words_that_people_type(
    path: tuple[str, ...], command: click.Command
) -> None:
    """An option that is one of a few words takes them as they stand in listings and examples, not as names of the code."""
    for parameter in command.params:
        if isinstance(parameter.type, click.Choice):
            assert all(type(choice) is str for choice in parameter.type.choices), path
            assert all(choice == choice.lower() for choice in parameter.type.choices), path


def test_the_files_of_the_help_work(tmp_path: Path) -> None:
    """The files that the help shows can be used as they stand."""
    found = dict(commands(processor.cli.cli, ("fairpost",)))
    operators = tmp_path / "operators.toml"
    operators.write_text(file_example(found["fairpost", "operators", "apply"]), encoding="utf-8")
    assert [one.name for one in load_operators(operators)] == ["gmail", "other"]
    campaign = tmp_path / "spring.toml"
    campaign.write_text(file_example(found["fairpost", "publish", "campaign"]), encoding="utf-8")
    event = read_campaign_file(campaign, read_campaign_event)
    assert event.campaign_id == tomllib.loads(campaign.read_text())["campaign_id"]


def test_the_reference_is_that_of_the_commands() -> None:
    """docs/commands.md is what `make docs` writes now, with the help of every command."""
    made = text()
    assert FILE.read_text(encoding="utf-8") == made
    for one in ALL:
        path = one.values[0]
        assert isinstance(path, tuple)
        assert help_of(PROGRAMS[path[0]], path) in made


def test_the_width_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same at whatever terminal it is made."""
    monkeypatch.setenv("COLUMNS", "40")
    assert text() == FILE.read_text(encoding="utf-8")
