"""`fairpost log parse`: one line for each line, whatever comes in, at once and in constant memory."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from processor.cli import cli
from processor.cli.log import LONGEST

CORPUS = sorted((Path(__file__).parents[1] / "data" / "postfix-logs").glob("*.log"))
LINE = b"Nov 30 17:25:01 mx1 postfix-a/qmgr[99]: 3F5A91C0B5: removed"
PROGRAM = [str(Path(sys.executable).with_name("fairpost")), "log", "parse"]


def parse(*words: str, stdin: bytes = b"") -> Result:
    """Runs the command."""
    return CliRunner().invoke(cli, ["log", "parse", *words], input=stdin)


def objects(*words: str, stdin: bytes = b"") -> list[dict[str, Any]]:
    """What it prints with `--json`."""
    result = parse("--json", *words, stdin=stdin)
    assert (result.exit_code, result.stderr) == (0, "")
    return [json.loads(line) for line in result.stdout_bytes.split(b"\n")[:-1]]


def test_one_object_a_line() -> None:
    """Every line of every file is one object, in the order of the files, and stdin is one of them."""
    expected = sum(path.read_bytes().count(b"\n") for path in CORPUS)
    found = objects(*map(str, CORPUS[:10]), "-", *map(str, CORPUS[10:]), stdin=LINE)
    assert len(found) == expected + 1
    assert Counter(line["kind"] for line in found)["delivery"] > 100
    assert next(line for line in found if line["host"] == "mx1")["queue_id"] == "3F5A91C0B5"


@pytest.mark.parametrize(
    ("stdin", "kinds"),
    [
        (b"", []),
        (b"\n", ["other"]),
        (LINE, ["removed"]),
        (LINE + b"\r\n" + LINE + b"\n", ["removed", "removed"]),
        (b"no line of a log\n" + LINE, ["other", "removed"]),
        (b"\0\n\xff\xfe\xc3\n\n" + LINE, ["other", "other", "other", "removed"]),
        (LINE.replace(b"removed", b"to=<\xc4>, \0, status=sent (\xff)"), ["other"]),
        (LINE + b"\x0b" + LINE + "\u2028\x85".encode() + b"\r" + LINE, ["other"]),
    ],
)
def test_odd_input(stdin: bytes, kinds: list[str]) -> None:
    """A line ends with LF or CRLF and nothing else; any bytes are a line, and so is a last one without its end."""
    found = objects("-", stdin=stdin)
    assert [line["kind"] for line in found] == kinds
    assert len(parse("-", stdin=stdin).stdout_bytes.splitlines()) == len(kinds)


def test_a_line_of_ten_megabytes() -> None:
    """A line without an end is cut as Postfix cuts its own, and what follows it is read."""
    long = LINE.replace(
        b"removed", b"to=<a@b.test>, relay=none, delay=1, status=sent (" + b"x" * 10_000_000
    )
    first, second = objects(stdin=long + b"\n" + LINE)
    assert (first["kind"], first["recipient"], second["kind"]) == (
        "delivery",
        "a@b.test",
        "removed",
    )
    assert len(first["text"]) < LONGEST


def test_words_and_zone() -> None:
    """Without `--json` a line is a line of words; `--tz` is the zone of stamps that name none."""
    told = parse("--tz", "America/New_York", stdin=LINE).stdout
    assert told.split()[1:] == ["removed", "3F5A91C0B5", "removed"]
    assert told[4:21] == "-11-30T22:25:01Z "


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("/nonexistent.log",), "'/nonexistent.log' does not exist"),
        ((str(CORPUS[0]), "/nonexistent.log"), "'/nonexistent.log' does not exist"),
        (("/",), "'/' is a directory"),
        (("--tz", "Mars/Olympus", "-"), "'Mars/Olympus' is no time zone"),
        (("--tz", "../etc/passwd", "-"), "'../etc/passwd' is no time zone"),
    ],
)
def test_wrong_usage(words: tuple[str, ...], complaint: str) -> None:
    """A file that is missing is named before anything is printed, exit code 2."""
    result = parse(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert complaint in " ".join(result.stderr.split())


@pytest.fixture
def piped() -> Iterator[subprocess.Popen[bytes]]:
    """The command between two pipes."""
    with subprocess.Popen(
        [*PROGRAM, "--json", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        yield process
        process.kill()


def test_each_line_is_answered_at_once(piped: subprocess.Popen[bytes]) -> None:
    """Behind `tail -f` a line is answered when it came, not when a buffer is full; and the end of the reader ends it well."""
    assert piped.stdin
    assert piped.stdout
    assert piped.stderr
    for _ in range(3):
        piped.stdin.write(LINE + b"\n")
        piped.stdin.flush()
        assert json.loads(piped.stdout.readline())["kind"] == "removed"
    piped.stdout.close()
    piped.stdin.write(LINE + b"\n")
    piped.stdin.close()
    assert piped.wait(30) == 0
    assert piped.stderr.read() == b""


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """`… | head -1` ends it without a word, however much is left; and no line, however long, is held in memory."""
    log = tmp_path / "mail.log"
    with log.open("wb") as file:
        file.seek(250_000_000)
        file.write(b"\n")
        file.writelines([LINE + b"\n"] * 5_000)
    command = f"ulimit -v 250000; {' '.join(PROGRAM)} {log} | tail -c +70000 | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.strip()
