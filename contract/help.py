"""Help: what the help of every command ends with, and the reference made of all of it."""

from collections.abc import Iterator

import click

EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted."

_WIDTH = 100


def commands(
    command: click.Command, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """A command and all below it, each with the words that name it.

    Args:
        command: of a program.
        path: the words that name it, the program's name first.
    """
    yield path, command
    if isinstance(command, click.Group):
        for name, below in sorted(command.commands.items()):
            yield from commands(below, (*path, name))


def end_with_exit_codes(program: click.Group) -> None:
    """Has the help of every command end with what its exit code says."""
    for _, command in commands(program, ()):
        command.epilog = EXIT_CODES


def help_of(program: click.Group, path: tuple[str, ...]) -> str:
    """The help of a command as the program prints it, whatever the terminal."""
    context = click.Context(program, info_name=path[0], **program.context_settings)
    context.terminal_width = _WIDTH
    command: click.Command = program
    for name in path[1:]:
        assert isinstance(command, click.Group)  # noqa: S101  as the path says
        command = command.commands[name]
        context = click.Context(command, parent=context, info_name=name, **command.context_settings)
    return command.get_help(context)


def reference(programs: dict[str, click.Group]) -> str:
    """The help of every command of the programs, as one Markdown document."""
    sections = [
        f"## {' '.join(path)}\n\n```text\n{help_of(program, path)}\n```\n"
        for name, program in programs.items()
        for path, _ in commands(program, (name,))
    ]
    return "\n".join(["# Commands\n", "What `--help` says, of every command.\n", *sections])
