"""Writes the reference of both command lines beside this file: `python -m docs.commands`."""

from pathlib import Path

import processor.cli
import smtp_agent.cli
from contract.help import reference

FILE = Path(__file__).with_name("commands.md")


def text() -> str:
    """The reference as the commands are now."""
    return reference({"fairpost": processor.cli.cli, "fairpost-agent": smtp_agent.cli.cli})


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
