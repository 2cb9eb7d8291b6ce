"""How the commands of both sides speak to people: listings, progress, one-line errors, exit codes, logs.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration. Listings and nothing else go to standard output.
"""

import errno
import io
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Final, NoReturn, cast

import click
from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from contract import printable
from contract.given_files import FileError, read_lines
from contract.outage import first_line
from contract.settings import SettingsError

FAILED: Final = 1
WRONG: Final = 2
_INTERRUPTED: Final = 130
_TALKATIVE: Final = ("faust", "mode", "aiokafka", "asyncio", "psycopg")
_REPEATED_AFTER: Final = 60.0
_STANDARD_ERROR: Final = 2
_PRIORITIES: Final = (
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
    (logging.NOTSET, 7),
)
"""syslog(3)'s, from the least level of logging."""


class CommandError(Exception):
    """A command could not do what it was asked; the text is one line that says what to do."""


def run(command: click.Command, failures: tuple[type[Exception], ...]) -> NoReturn:
    """Runs a command and ends the process: an error is one line on standard error.

    Args:
        command: the command line.
        failures: what may happen besides `CommandError`, told by its first line.
    """
    sys.excepthook = _tell_crash
    try:
        code = command.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(_INTERRUPTED)
    except SettingsError as error:
        complain(str(error))
        sys.exit(WRONG)
    except Exception as error:
        if not isinstance(error, (CommandError, *failures)):
            raise
        complain(first_line(error))
        sys.exit(FAILED)
    sys.exit(code if isinstance(code, int) else 0)


def complain(text: str) -> None:
    """One line for a person, on standard error, whatever data is in it."""
    click.echo(printable.one_line(text), err=True)


def tell(text: str) -> None:
    """One line for a person, on standard output, whatever data is in it."""
    click.echo(printable.one_line(text))


def octets_out() -> BinaryIO:
    """Standard output for records of others: octet by octet, or, on a terminal, what it can show of them."""
    return cast("BinaryIO", _Shown()) if sys.stdout.isatty() else sys.stdout.buffer


class _Shown(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, octets: Any) -> int:
        sys.stdout.write(printable.lines(bytes(octets).decode(errors="backslashreplace")))
        return len(octets)


def _tell_crash(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    story = "".join(traceback.format_exception(kind, error, trace))
    click.echo(printable.lines(story), err=True, nl=False)


def show(
    rows: Sequence[Struct],
    *,
    as_json: bool,
    columns: Sequence[str] | None = None,
    one_line: bool = False,
) -> None:
    """A listing on standard output: one JSON array, or a table for people.

    Args:
        rows: structs of one kind.
        as_json: one array of objects with all fields.
        columns: the fields that the table shows; all by default.
        one_line: the array is a line of its own, for listings that follow one another.
    """
    if as_json:
        show_json(rows, one_line=one_line)
        return
    if not (rows or columns):
        return
    names = columns or rows[0].__struct_fields__
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        numeric = bool(rows) and isinstance(getattr(rows[0], name), int | float)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell(getattr(row, name)) for name in names))
    width = None if sys.stdout.isatty() else 200
    _Terminal(width=width, highlight=False, markup=False, emoji=False).print(table)


class _Terminal(Console):
    """rich's, which leaves it to others what follows when nobody reads any more."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def show_json(value: object, *, one_line: bool = False) -> None:
    """JSON on standard output, indented for people, or in one line."""
    click.echo(printable.json_text(value, indent=None if one_line else 1))


def cell(value: object) -> str:
    """A value for people: a dash for nothing, times in UTC to the second, control characters escaped."""
    match value:
        case None:
            return "-"
        case datetime():
            return value.strftime("%Y-%m-%dT%H:%M:%SZ")
        case _:
            return printable.one_line(str(value))


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """A bar on standard error where that is a terminal; gives a function to be told how much of how much is done."""
    err = Console(stderr=True)
    progress = Progress(
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
        disable=not err.is_terminal,
        transient=True,
    )
    with progress:
        task = progress.add_task(what, total=None)

        def seen(done: int, total: int | None) -> None:
            progress.update(task, completed=done, total=total)

        yield seen


@contextmanager
def counted_lines(file: IO[bytes]) -> Iterator[Iterator[bytes]]:
    """The lines of a file, with a bar that follows them on a terminal.

    They raise CommandError at one that is too long.
    """
    path = Path(file.name)
    total = path.stat().st_size if path.is_file() else None
    with progress_bar("bytes") as seen:

        def lines() -> Iterator[bytes]:
            read = 0
            try:
                for line in read_lines(file):
                    read += len(line)
                    seen(read, total)
                    yield line
            except FileError as error:
                raise CommandError(f"{file.name}: {error}") from None

        yield lines()


@contextmanager
def while_read() -> Iterator[None]:
    """Output that ends without a complaint when nobody reads it any more."""
    try:
        yield
    except BrokenPipeError:
        # What is still in the buffer goes nowhere, so that no error comes at the exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def log_to_stderr(level: str) -> None:
    """Logs of a process: one line an event, times in UTC; the lines of a traceback after it are indented.

    Where standard error is systemd's journal, each line has its priority, so that `journalctl -p warning` finds it.
    """
    formatter = (_JournalFormatter if _is_journal() else _LineFormatter)(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(_OnceAWhile())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for library in _TALKATIVE:
        logging.getLogger(library).setLevel(max(logging.WARNING, logging.getLogger().level))


class _LineFormatter(logging.Formatter):
    """No data in a message begins a line: only an event does."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  its base names it
        return printable.one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _indented(super().formatStack(stack_info))


class _JournalFormatter(_LineFormatter):
    """Each line begins with its priority, as sd-daemon(3) has it."""

    def format(self, record: logging.LogRecord) -> str:
        priority = next(number for level, number in _PRIORITIES if record.levelno >= level)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).split("\n"))


def _is_journal() -> bool:
    # systemd.exec(5) JOURNAL_STREAM; a child whose standard error is another inherits the variable all the same.
    stream = os.fstat(_STANDARD_ERROR)
    return os.environ.get("JOURNAL_STREAM") == f"{stream.st_dev}:{stream.st_ino}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in printable.lines(text).split("\n"))


class _OnceAWhile(logging.Filter):
    """Lets a library say the same thing once a minute: during an outage some say it ten times a second."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(_TALKATIVE):
            return True
        text = str(record.msg)
        last = self._said.get((record.name, text))
        if last is not None and record.created - last < _REPEATED_AFTER:
            return False
        self._said[record.name, text] = record.created
        record.msg, record.args = record.getMessage().replace("\n", " "), ()
        return True


def completion(program: str, shell: str) -> str:
    """The line that turns on completion of a program's commands and options in a shell."""
    variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
    if shell == "fish":
        return f"{variable}=fish_source {program} | source"
    return f'eval "$({variable}={shell}_source {program})"'
