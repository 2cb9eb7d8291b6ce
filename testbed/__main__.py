"""Starts everything and says where it is, until Ctrl-C: `python -m testbed [--signed DOMAIN]`."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import suppress

from testbed.fleet import Testbed
from testbed.processes import ServiceError


def describe(testbed: Testbed) -> str:
    """Return where everything is, a line each."""
    lines = [
        f"folder      {testbed.directory}",
        f"kafka       {testbed.kafka.bootstrap_servers}",
        f"postgres    {testbed.postgres.dsn()}",
    ]
    lines += [
        f"instance    {instance.name}: feed 127.0.0.1:{instance.feed_port}, "
        f"fluentd 127.0.0.1:{instance.fluentd_port}, sends from {instance.postfix.address}, "
        f"configuration {instance.postfix.config_directory}, log {instance.log}"
        for instance in testbed.instances.values()
    ]
    lines += [
        f"operator    {operator.name}: 127.0.0.1:{operator.port}, {', '.join(operator.domains)}"
        for operator in testbed.operators.values()
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the testbed until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m testbed", description=__doc__)
    parser.add_argument(
        "--signed",
        metavar="DOMAIN",
        action="append",
        default=[],
        help="a From domain that has a DKIM key; then mail of no other domain leaves",
    )
    signed: list[str] = parser.parse_args().signed
    # A shell starts what runs in the background with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt), Testbed(signed=signed) as testbed:
        print(describe(testbed), flush=True)
        print("ready; Ctrl-C stops it", flush=True)
        signal.pause()


if __name__ == "__main__":
    try:
        main()
    except ServiceError as error:
        sys.exit(f"testbed: {error}")
