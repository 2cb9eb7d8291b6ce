"""Watching: a listing is shown once, or again and again until Ctrl-C."""

import json
from collections.abc import Callable

import click
import pytest
from click.testing import CliRunner
from msgspec import Struct

from contract.watching import EVERY, watch_option, watched, watched_rows


class Row(Struct, frozen=True):
    """A row of a listing."""

    name: str


def interrupted_after(turns: int, rested: list[float]) -> Callable[[float], None]:
    """Rests without time, and is interrupted like a sleep."""

    def rest(seconds: float) -> None:
        rested.append(seconds)
        if len(rested) == turns:
            raise KeyboardInterrupt

    return rest


def test_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --watch it is told once, nothing stands around it, and what was found is answered."""
    assert watched(None, lambda: 7, click.echo, as_json=False) == 7
    assert capsys.readouterr().out == "7\n"


def test_again_and_again_on_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Each time it is looked at anew, under a line with the time; Ctrl-C ends it."""
    numbers = iter(range(9))
    rested: list[float] = []
    rest = interrupted_after(3, rested)
    assert watched(4, lambda: next(numbers), click.echo, as_json=False, rest=rest) is None
    assert rested == [4, 4, 4]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1::2] == ["0", "1", "2"]
    assert all(line.startswith("--- 20") and line.endswith("Z") for line in lines[::2])


def test_again_and_again_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The screen is cleared only when the next is there to be shown, and a line says how to end it."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    def look() -> str:
        shown.append(capsys.readouterr().out)
        return "told"

    shown: list[str] = []
    watched(2, look, click.echo, as_json=False, rest=interrupted_after(2, []))
    shown.append(capsys.readouterr().out)
    assert shown[0] == ""
    for screen in shown[1:]:
        assert screen.startswith("\x1b[2J")
        assert "every 2 s; Ctrl-C ends it" in screen
        assert screen.endswith("told\n")


def test_an_interrupted_look_ends_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C while the database is asked ends it as while it rests."""

    def look() -> str:
        raise KeyboardInterrupt

    assert watched(2, look, click.echo, as_json=False) is None
    assert capsys.readouterr().out == ""


def listing(turns: int) -> click.Command:
    """A command with a listing that is interrupted after some turns."""
    looks: list[int] = []

    def look() -> list[Row]:
        if len(looks) == turns:
            raise KeyboardInterrupt
        looks.append(1)
        return [Row(f"n{len(looks)}")]

    @click.command()
    @watch_option
    @click.option("--json", "as_json", is_flag=True)
    @click.argument("word", required=False)
    def command(watch: float | None, word: str | None, *, as_json: bool) -> None:
        click.echo(f"{watch} {word}", err=True)
        watched_rows(0 if watch else None, look, as_json=as_json)

    return command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "None None"),
        (["--watch"], f"{EVERY} None"),
        (["--watch", "--json"], f"{EVERY} None"),
        (["--watch", "5", "--json"], "5.0 None"),
        (["--watch=0.5", "spring"], "0.5 spring"),
        (["spring", "--watch"], f"{EVERY} spring"),
    ],
)
def test_the_option(words: list[str], said: str) -> None:
    """It takes seconds or none, before or after other words."""
    told = CliRunner().invoke(listing(2), words)
    assert (told.exit_code, told.stderr) == (0, f"{said}\n")


def test_watched_json_is_a_line_each_time() -> None:
    """With --json what is watched is JSON lines, one array each, and nothing else."""
    told = CliRunner().invoke(listing(3), ["--watch", "--json"])
    assert [json.loads(line) for line in told.stdout.splitlines()] == [
        [{"name": "n1"}],
        [{"name": "n2"}],
        [{"name": "n3"}],
    ]


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "1e9"])
def test_seconds_that_are_none(seconds: str) -> None:
    """What is no time to wait is wrong usage."""
    assert CliRunner().invoke(listing(1), [f"--watch={seconds}"]).exit_code == 2
