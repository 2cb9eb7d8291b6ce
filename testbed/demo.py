"""The demo: three campaigns through two Postfix instances to four mailbox operators, all of them real.

Ends by itself with one line that says what became of every due e-mail, and with exit code 1 if one was lost, went out
twice, or is not in the state that the mailbox operators' own records say.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from testbed.fleet import Testbed
from testbed.installation import Installation, OperatorRule
from testbed.processes import ServiceError
from testbed.reckoning import Reckoning, reckon

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from testbed.installation import Running

OPERATORS = (
    OperatorRule("gmail", ("gmail.test", "googlemail.test"), 720),
    OperatorRule("outlook", ("outlook.test", "hotmail.test"), 900),
    OperatorRule("yahoo", ("yahoo.test",), 300),
    OperatorRule("other", (), 600),
)
DOMAINS = (
    ("gmail.test",) * 4 + ("outlook.test",) * 3 + ("yahoo.test", "example.test", "hotmail.test")
)

SIGNED = "shop.example"
"""The From domain, which OpenDKIM beside each Postfix has a key for."""

# Greylisted mail is tried again soon enough to be seen.
POSTFIX = {"minimal_backoff_time": "5s", "maximal_backoff_time": "10s", "queue_run_delay": "5s"}

GIVE_UP_SECONDS = 110
REFRESH_SECONDS = 0.5
LINE_SECONDS = 5.0


@dataclass(frozen=True)
class Campaign:
    """A campaign of the demo; `copies` is how often each due e-mail is published."""

    campaign_id: str
    name: str
    contacts: int
    copies: int = 1


CAMPAIGNS = (
    Campaign("spring-sale", "Spring sale", 2_000),
    Campaign("newsletter", "Newsletter", 600),
    Campaign("webinar", "Webinar invitation", 150, copies=2),
)
CANCELLED = CAMPAIGNS[1]

TEMPLATE = {
    "subject": "{{ name }}, news for you",
    "text": "Hello {{ name }},\n\nthis is message {{ number }} of the demo.\n",
    "html": "<p>Hello <b>{{ name }}</b>,</p><p>this is message {{ number }} of the demo.</p>",
}


def contacts_csv(campaign: Campaign) -> str:
    """The contacts: some mailboxes do not exist, some are full, some operators greylist."""
    return "user_id,email,name,number\n" + "".join(
        f"{campaign.campaign_id}-{n},{_mood(n)}user{n}@{DOMAINS[n % len(DOMAINS)]},Zoë {n},{n}\n"
        for n in range(campaign.contacts)
    )


def _mood(number: int) -> str:
    if number % 23 == 0:
        return "reject."
    if number % 37 == 1:
        return "full."
    if number % 47 == 0:
        return "grey."
    return ""


def publish(installation: Installation, campaign: Campaign) -> None:
    """Publish the campaign and its due e-mails, as a service would."""
    path = installation.directory / f"{campaign.campaign_id}.json"
    event = {
        "campaign_id": campaign.campaign_id,
        "name": campaign.name,
        "sender": f"Demo Shop <news@{SIGNED}>",
        "scheduled_for": "2026-01-01T00:00:00Z",
        "templates": {"offer": TEMPLATE},
        "unsubscribe_url": "https://shop.example/unsubscribe?user={{ user_id }}",
    }
    path.write_text(json.dumps(event))
    installation.fairpost("publish", "campaign", str(path))
    for _ in range(campaign.copies):
        installation.fairpost(
            *("publish", "due-emails", "-", "--campaign", campaign.campaign_id),
            *("--email-key", "offer"),
            stdin=contacts_csv(campaign).encode(),
        )


@dataclass(frozen=True)
class Share:
    """How a campaign stands at one operator."""

    campaign_id: str
    operator: str
    messages: int
    sent: int
    bounced: int
    deferred: int
    suppressed: int
    cancelled: int
    under_way: int
    servers: str


ENDS = ("sent", "bounced", "deferred", "suppressed", "cancelled")
"""What becomes of the messages: full mailboxes are tried again later, and who bounced gets no other campaign."""

_SHARES = """
SELECT campaign_id, operator, sum(size)::int, sum(sent)::int, sum(bounced)::int, sum(deferred)::int,
       sum(suppressed)::int, sum(cancelled)::int, sum(planned + handed + queued)::int, coalesce(string_agg(DISTINCT instance, ' '), '')
  FROM chunks JOIN chunk_counts USING (chunk_id) GROUP BY campaign_id, operator ORDER BY campaign_id, operator"""

# Full mailboxes stay deferred; greylisted ones do not.
_WAITING = """
SELECT (SELECT count(*) FROM pending)
     + (SELECT count(*) FROM messages WHERE state IN ('planned', 'handed', 'queued')
                                         OR state = 'deferred' AND dsn IS DISTINCT FROM '4.2.2')"""

_DISPATCHES = "SELECT count(*) FROM dispatches"


def watch(installation: Installation, due: int, console: Console) -> Iterator[list[Share]]:
    """Gives how things stand, twice a second, until nothing moves or time is up."""
    end = time.monotonic() + GIVE_UP_SECONDS
    with installation.connect() as connection:
        while time.monotonic() < end:
            yield [Share(*row) for row in connection.execute(_SHARES).fetchall()]
            (reserved,) = connection.execute(_DISPATCHES).fetchone() or (0,)
            (waiting,) = connection.execute(_WAITING).fetchone() or (0,)
            if reserved >= due and waiting == 0:
                yield [Share(*row) for row in connection.execute(_SHARES).fetchall()]
                return
            time.sleep(REFRESH_SECONDS)
    console.print(f"[red]not done after {GIVE_UP_SECONDS} s[/red]")


def table(shares: Sequence[Share]) -> Table:
    """The screen: a row for each campaign at each operator."""
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("campaign", "operator"):
        grid.add_column(column)
    grid.add_column("progress", width=24)
    for column in ("messages", *ENDS):
        grid.add_column(column, justify="right")
    grid.add_column("server")
    for share in shares:
        done = share.messages - share.under_way
        grid.add_row(
            *(share.campaign_id, share.operator),
            ProgressBar(total=share.messages, completed=done, width=24),
            str(share.messages),
            *(str(getattr(share, end)) for end in ENDS),
            share.servers,
        )
    return grid


def line(shares: Sequence[Share]) -> str:
    """The same as one line, for where there is no terminal."""
    parts = []
    for campaign in CAMPAIGNS:
        own = [share for share in shares if share.campaign_id == campaign.campaign_id]
        done = sum(share.messages - share.under_way for share in own)
        parts.append(f"{campaign.campaign_id} {done}/{campaign.contacts}")
    return "  ".join(parts)


def run(installation: Installation, console: Console) -> None:
    """Publish everything, cancel a campaign half-way, and show how it goes until nothing moves."""
    for campaign in CAMPAIGNS:
        publish(installation, campaign)
    started = time.monotonic()
    cancelled = False
    told = 0.0
    due = sum(campaign.contacts for campaign in CAMPAIGNS)
    with Live(console=console, transient=False, auto_refresh=False) as live:
        for shares in watch(installation, due, console):
            own = [share for share in shares if share.campaign_id == CANCELLED.campaign_id]
            handed = sum(share.messages - share.under_way for share in own)
            if not cancelled and handed >= CANCELLED.contacts / 2:
                cancelled = True
                installation.fairpost("campaigns", "cancel", CANCELLED.campaign_id, "--yes")
            seconds = time.monotonic() - started
            if console.is_terminal:
                live.update(table(shares), refresh=True)
            elif seconds - told >= LINE_SECONDS:
                told = seconds
                console.print(f"{seconds:5.1f} s  {line(shares)}", soft_wrap=True)
    if not console.is_terminal:
        console.print(table(shares))


def summary(due: int, reckoning: Reckoning) -> str:
    """The last line."""
    states = reckoning.states
    return (
        f"demo: due={due} reserved={reckoning.reserved} {' '.join(f'{end}={states[end]}' for end in ENDS)}"
        f" lost={reckoning.lost + due - reckoning.reserved} twice={reckoning.twice}"
    )


def judge(due: int, reckoning: Reckoning, console: Console) -> bool:
    """Say what does not add up; True where all does."""
    for complaint in reckoning.complaints[:20]:
        console.print(complaint, style="red", soft_wrap=True)
    counted = sum(reckoning.states[state] for state in ENDS)
    return due == reckoning.reserved == counted and not reckoning.complaints


def explain(testbed: Testbed, installation: Installation, processes: dict[str, Running]) -> str:
    """How to look at a demo that was left running."""
    settings = "\n".join(f"  export {k}={v}" for k, v in sorted(installation.environment.items()))
    metrics = "\n".join(
        f"  curl -s http://{p.address}:{p.metrics_port}/metrics | grep ^fairpost_    # {name}"
        for name, p in processes.items()
    )
    return (
        f"\nIt is running; Ctrl-C ends it. In another terminal:\n{settings}\n"
        "  .venv/bin/fairpost status\n"
        "  .venv/bin/fairpost campaigns list\n"
        "  .venv/bin/fairpost campaigns show spring-sale\n"
        "  .venv/bin/fairpost operators list\n"
        f"  psql '{testbed.postgres.dsn(installation.name)}?options=-csearch_path%3Dfairpost'"
        " -c 'SELECT state, count(*) FROM messages GROUP BY state'\n"
        f"{metrics}\n"
        f"  ls {testbed.directory}    # every log\n"
    )


def main() -> int:
    """Run the demo; answers its exit code."""
    parser = argparse.ArgumentParser(prog="python -m testbed.demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave it running until Ctrl-C")
    keep: bool = parser.parse_args().keep
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    due = sum(campaign.contacts for campaign in CAMPAIGNS)
    started = time.monotonic()
    try:
        with (
            Testbed(instances=("mta-1", "mta-2"), postfix=POSTFIX, signed=(SIGNED,)) as testbed,
            Installation(testbed, "demo", OPERATORS, prefix="") as installation,
        ):
            processes = {
                "worker": installation.start_worker(),
                "tracker": installation.start_tracker(),
            }
            for instance in testbed.instances.values():
                processes[f"agent of {instance.name}"] = installation.start_agent(instance)
            console.print(
                "Kafka, Postgres, two Postfix with Fluentd and OpenDKIM, four mailbox operators, worker, tracker, two agents:"
                f" running after {time.monotonic() - started:.1f} s",
                soft_wrap=True,
            )
            run(installation, console)
            reckoning = reckon(installation, testbed.operators.values())
            right = judge(due, reckoning, console)
            if not right:
                testbed.keep()
                console.print(f"every log is in {testbed.directory}", soft_wrap=True)
            console.print(summary(due, reckoning), soft_wrap=True)
            if keep:
                console.print(explain(testbed, installation, processes), soft_wrap=True)
                wait_for_interrupt()
            return 0 if right else 1
    except ServiceError as error:
        console.print(f"demo: {error}", style="red", soft_wrap=True)
        return 1


def wait_for_interrupt() -> None:
    """Return at Ctrl-C or SIGTERM."""
    done = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    done.wait()


if __name__ == "__main__":
    sys.exit(main())
