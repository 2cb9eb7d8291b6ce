"""Completion: names that are in the database, and silence where it does not answer."""

import asyncio
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from contract.operators import Operator
from processor.operators import apply_operators
from tests.integration.conftest import Fairpost, Post, scheduled
from tests.integration.test_status import register

Complete = Callable[..., list[str]]


@pytest.fixture
def complete(fairpost: Fairpost, monkeypatch: pytest.MonkeyPatch) -> Complete:
    """Completes the last of these words as bash asks for it; answers what is offered."""
    # As a script that is on PATH, not as a module of this test run's.
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)

    def _complete(*words: str) -> list[str]:
        monkeypatch.setenv("_FAIRPOST_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", " ".join(("fairpost", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        answer = fairpost()
        assert (answer.code, answer.err) == (0, "")
        return [line.partition(",")[2] for line in answer.out.decode().splitlines() if line]

    return _complete


async def test_names_are_completed(post: Post, complete: Complete) -> None:
    """Campaigns, instances and operators that begin so are offered wherever one is named; an evil name is left out."""
    async with post.worker.connection() as connection:
        await apply_operators(
            connection, [Operator("gmail", ("g.test",)), Operator("other")], "ann", "a file"
        )
    await post.apply(*map(scheduled, ("spring", "spring_2", "summer", "s%", "spring\x1b[2J")))
    await register(post, "postfix-a")
    await register(post, "postfix-b")
    for words, offered in (
        (("campaigns", "show", "spr"), {"spring", "spring_2"}),
        (("campaigns", "cancel", "spring_"), {"spring_2"}),
        (("campaigns", "pause", "s%"), {"s%"}),
        (("campaigns", "export", "x"), set()),
        (("instances", "pause", ""), {"postfix-a", "postfix-b"}),
        (("instances", "retire", "postfix-b"), {"postfix-b"}),
        (("operators", "resume", "g"), {"gmail"}),
        (("uncertain", "list", "--instance", "p"), {"postfix-a", "postfix-b"}),
        (("uncertain", "list", "--campaign", "su"), {"summer"}),
        (("suppressions", "list", "--campaign", "su"), {"summer"}),
        (("publish", "due-emails", "--campaign", "su"), {"summer"}),
        (("campaigns", "retry-rejected", "su"), {"summer"}),
        (("campaigns", "retry-rejected", "spring", "--operator", "g"), {"gmail"}),
        (("campaigns", "sho"), {"show"}),
    ):
        assert set(await asyncio.to_thread(complete, *words)) == offered, words


def test_nothing_is_offered_where_nothing_answers(
    complete: Complete, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without settings, without a database, and with one that hangs there is no offer, no complaint and no long wait."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for dsn in ("", "nonsense", f"host={tmp_path}", f"host=127.0.0.1 port={port}"):
            monkeypatch.setenv("FAIRPOST_DATABASE", dsn)
            assert complete("campaigns", "show", "s") == []
    assert complete("--config", "/nonexistent.toml", "campaigns", "show", "s") == []


async def test_the_settings_file_that_is_named(
    post: Post,
    complete: Complete,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Completion reads the file that the command line itself names."""
    await post.apply(scheduled("spring"))
    file = tmp_path / "fairpost.toml"
    file.write_text(
        f'[processor]\ndatabase = "{environment["FAIRPOST_DATABASE"]}"\nkafka_bootstrap_servers = "k"\n'
    )
    monkeypatch.delenv("FAIRPOST_DATABASE")
    words = ("--config", str(file), "campaigns", "show", "s")
    assert await asyncio.to_thread(complete, *words) == ["spring"]
