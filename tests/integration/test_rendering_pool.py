"""The rendering pool: whatever a template does costs its own message, and no process is left behind."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from contract.addresses import AddressError
from contract.events import Template
from contract.rendering import MAXIMUM_MESSAGE, Content, Recipient, Rendered, Renderer
from contract.rendering_pool import BATCH_OCTETS, RenderingPool

DATE = datetime(2026, 11, 30, 9, 5, 7, tzinfo=UTC)
FOREVER = float("inf")

SLOW = "{% for a in range(30000) %}{{ 'x'|upper|lower|upper|lower }}{% endfor %}"
"""Some 50 ms."""
LOOP = "{% for a in range(99) %}{% for b in range(999) %}{{ range(99999)|list|sum }}{% endfor %}{% endfor %}"
"""Minutes, in as many steps as a template may take."""
C_CALL = (
    "{% set a=[1]*1000000 %}{% set b=[1]*1000000 %}"
    + "{% set a=[a]*1000 %}{% set b=[b]*1000 %}" * 2
    + "{{ a == b }}"
)
"""Minutes in one comparison of two lists, within which Python looks at no signal."""
MEMORY = "{% set s = namespace(x=[]) %}{% for a in range(9999) %}{% set s.x = [s.x, [1]*1000000] %}{% endfor %}"
COMPILING = "{{ a }}{% if b %}{{ c|upper }}{% endif %}" * 50_000
"""Seconds to compile."""
EMOJI = "{{ '\N{GRINNING FACE}' * 1000000 }}"


def content(campaign_id: str = "c", revision: int = 1, **parts: str | Template) -> Content:
    """A campaign with a good template, and one of each text."""
    parts = {"good": "Hello {{ name }}", **parts}
    return Content(
        campaign_id=campaign_id,
        revision=revision,
        sender="Shop <news@shop.test>",
        reply_to=None,
        templates={
            key: part if isinstance(part, Template) else Template(subject="Hi", text=part)
            for key, part in parts.items()
        },
        unsubscribe_url=None,
        headers={},
    )


def recipients(*email_keys: str, **variables: Any) -> list[Recipient]:
    """A recipient for each key."""
    return [
        Recipient(n, f"u{n}", f"user{n}@mail.test", key, {"name": "Ann", **variables})
        for n, key in enumerate(email_keys)
    ]


async def render(
    pool: RenderingPool, of: Content, to: list[Recipient], date: datetime, deadline: float
) -> list[Rendered | str]:
    """The answers of all slices."""
    return [answer async for part in pool.render(of, to, date, deadline) for answer in part]


def shape(answers: list[Rendered | str]) -> list[str | None]:
    """Why there is no message, or None."""
    return [answer if isinstance(answer, str) else None for answer in answers]


def workers(parent: int | None = None) -> list[int]:
    """The rendering processes of a process."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            ppid = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
            if ppid == (parent or os.getpid()):
                command = (directory / "cmdline").read_bytes()
                if b"contract.rendering_worker" in command:
                    found.append(int(directory.name))
    return found


async def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  there is no event of another process
            await asyncio.sleep(0.01)


@pytest.fixture
async def pool() -> AsyncIterator[RenderingPool]:
    """A pool; when the test is over no process of it is left."""
    pool = RenderingPool("bounce.test")
    yield pool
    await pool.close()
    assert workers() == []


async def test_messages_are_those_of_a_renderer(pool: RenderingPool) -> None:
    """What a process renders are the octets that a renderer makes, in the order of the recipients, over several slices."""
    of = content(broken="Hello {{ surname }}", long="<p>{{ name }}</p>\n" * 50)
    to = recipients(*(["long"] * 500), "broken", "unknown", "good", big=10**40)
    renderer = Renderer(of, "bounce.test")
    answers = await render(pool, of, to, DATE, FOREVER)
    good = [*range(500), 502]
    assert [answers[n] for n in good] == [renderer.render(to[n], DATE) for n in good]
    assert shape(answers[500:502]) == [
        "campaign 'c', email_key 'broken': text: line 1: 'surname' is undefined",
        "campaign 'c', email_key 'unknown': templates: the campaign has none for this email_key",
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (LOOP, ["rendering took longer than 0.25 s of CPU time"]),
        (C_CALL, ["rendering took longer than 0.25 s of CPU time"]),
        # Touching so much memory may take that long on a slow machine.
        (MEMORY, ["text: line 1: it takes too much memory", "rendering took longer than 0.25 s of CPU time"]),
        (COMPILING, ["compiling took longer than 1 s of CPU time"]),
        ("{{ 10**(10**8) }}", ["text: line 1: it makes too large a number"]),
        ("{{ 'x' * 10**9 }}", ["text: line 1: it makes more than 1000000 characters"]),
    ],
    ids=["loop", "C call", "memory", "compiling", "power", "text"],
)  # fmt: skip
async def test_a_template_that_takes_too_much_costs_its_own_message(
    pool: RenderingPool, text: str, why: list[str]
) -> None:
    """A template that loops, calls into C for minutes, or wants too much memory is told why; those before and after go out."""
    to = recipients("good", "bad", "good")
    before, answer, after = shape(await render(pool, content(bad=text), to, DATE, FOREVER))
    assert (before, after) == (None, None)
    assert answer in [f"campaign 'c', email_key 'bad': {one}" for one in why]


async def test_a_message_larger_than_postfix_takes_is_told_its_size(pool: RenderingPool) -> None:
    """A message over Postfix's limit has a reason that names its size."""
    of = content(bad=Template(subject="Hi", text=EMOJI, html=EMOJI))
    large, good = await render(pool, of, recipients("bad", "good"), DATE, FOREVER)
    assert isinstance(good, Rendered)
    assert large == (
        f"campaign 'c', email_key 'bad': message: its 10947797 octets are over {MAXIMUM_MESSAGE}"
    )


async def test_a_batch_holds_only_so_many_octets(pool: RenderingPool) -> None:
    """Large messages end a batch early, with what it has."""
    answers = await render(pool, content(large=EMOJI), recipients(*["large"] * 12), DATE, FOREVER)
    sizes = [len(answer.message) for answer in answers if isinstance(answer, Rendered)]
    assert len(sizes) == len(answers) < 12
    assert sum(sizes[:-1]) <= BATCH_OCTETS < sum(sizes)


async def test_variables_that_no_process_can_be_told(pool: RenderingPool) -> None:
    """Variables nested too deep cost their own message."""
    nested: list[Any] = []
    for _ in range(900):
        nested = [nested]
    to = recipients("good", "good", "good")
    to[1].variables["deep"] = nested
    assert shape(await render(pool, content(), to, DATE, FOREVER)) == [
        None,
        "campaign 'c', email_key 'good': variables: they are nested too deep",
        None,
    ]


async def test_other_campaigns_do_not_wait_for_one_that_burns(
    pool: RenderingPool, caplog: pytest.LogCaptureFixture
) -> None:
    """While one campaign's messages all run into their limit, other campaigns' batches are rendered in full, one after the other."""
    burning = asyncio.create_task(
        render(pool, content("burning", bad=LOOP), recipients(*["bad"] * 500), DATE, FOREVER)
    )
    await until(lambda: "campaign burning is rendered apart" in caplog.text)
    for number in range(40):
        for campaign_id in "abc":
            to = recipients(*["good"] * 50)
            answers = await render(pool, content(campaign_id), to, DATE, FOREVER)
            assert shape(answers) == [None] * 50, number
    assert not burning.done()
    burning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await burning
    assert caplog.text.count("is rendered apart") == 1


async def test_campaigns_take_turns(pool: RenderingPool) -> None:
    """A small batch that comes later ends before a large one of another campaign that needs long."""
    large = asyncio.create_task(
        render(pool, content("large", slow=SLOW), recipients(*["slow"] * 40), DATE, FOREVER)
    )
    await until(workers)
    assert shape(await render(pool, content(), recipients("good"), DATE, FOREVER)) == [None]
    assert not large.done()
    assert shape(await large) == [None] * 40


async def test_what_is_not_rendered_in_time_is_not_answered(pool: RenderingPool) -> None:
    """At the deadline the answers so far are returned, to the first recipients; after it there are none."""
    of = content(bad=LOOP)
    await render(pool, of, recipients("bad", "good"), DATE, FOREVER)
    to = recipients("good", *["bad"] * 500)
    answers = await render(pool, of, to, DATE, time.monotonic() + 3)
    assert 1 <= len(answers) < 500
    assert shape(answers)[0] is None
    assert await render(pool, of, to, DATE, time.monotonic()) == []


async def test_a_waiting_batch_ends_at_its_deadline(pool: RenderingPool) -> None:
    """Who waits for a turn that does not come leaves at the deadline, and the one whose turn it is gets its answer."""
    of = content(compiling=COMPILING)
    first = asyncio.create_task(render(pool, of, recipients("compiling"), DATE, FOREVER))
    await asyncio.sleep(0)
    assert await render(pool, content("d"), recipients("good"), DATE, time.monotonic() + 0.1) == []
    assert len(await first) == 1


async def test_new_content_gets_another_chance(
    pool: RenderingPool, caplog: pytest.LogCaptureFixture
) -> None:
    """A campaign whose template was mended is rendered from the new one, among the others again."""
    assert "longer" in str(await render(pool, content(x=LOOP), recipients("x"), DATE, FOREVER))
    (mended,) = await render(pool, content(revision=2, x="better"), recipients("x"), DATE, FOREVER)
    assert isinstance(mended, Rendered)
    assert b"better" in mended.message
    assert "longer" in str(
        await render(pool, content(revision=3, x=LOOP), recipients("x"), DATE, FOREVER)
    )
    assert caplog.text.count("is rendered apart") == 2


async def test_a_killed_process_costs_nothing(pool: RenderingPool) -> None:
    """A process that somebody kills between two batches is replaced, and no message is refused for it."""
    to = recipients(*["good"] * 50)
    for _ in range(3):
        assert shape(await render(pool, content(), to, DATE, FOREVER)) == [None] * 50
        (worker,) = workers()
        os.kill(worker, signal.SIGKILL)


async def test_a_process_killed_over_a_message(pool: RenderingPool) -> None:
    """A message whose process is killed once is rendered by the next."""
    of = content(slow=SLOW)
    await render(pool, of, recipients("good"), DATE, FOREVER)
    (worker,) = workers()
    rendering = asyncio.create_task(render(pool, of, recipients(*["slow"] * 5), DATE, FOREVER))
    await asyncio.sleep(0)
    os.kill(worker, signal.SIGKILL)
    assert shape(await rendering) == [None] * 5


async def test_a_message_that_ends_every_process_is_refused(pool: RenderingPool) -> None:
    """A message over which the process dies again and again is refused with the way it died; the pool works on."""
    of = content(slow=SLOW)

    async def kill_all() -> None:
        while True:
            for worker in workers():
                os.kill(worker, signal.SIGSEGV)
            await asyncio.sleep(0.001)

    await render(pool, of, recipients("good"), DATE, FOREVER)
    rendering = asyncio.create_task(
        render(pool, of, recipients(*["slow"] * 200), DATE, time.monotonic() + 5)
    )
    killing = asyncio.create_task(kill_all())
    answers = await rendering
    killing.cancel()
    assert {str(answer) for answer in answers} <= {
        "campaign 'c', email_key 'slow': rendering ended its process (SIGSEGV)"
    }
    assert shape(await render(pool, of, recipients("slow"), DATE, FOREVER)) == [None]


async def test_a_process_that_does_not_answer(
    pool: RenderingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process is killed, and what it was to render is rendered by another; nothing is refused."""
    await render(pool, content(), recipients("good"), DATE, FOREVER)
    (worker,) = workers()
    monkeypatch.setattr("contract.rendering_pool._SILENCE_SECONDS", 0.2)
    os.kill(worker, signal.SIGSTOP)
    rendering = asyncio.create_task(render(pool, content(), recipients("good"), DATE, FOREVER))
    await until(lambda: worker not in workers())
    monkeypatch.undo()
    assert shape(await rendering) == [None]


async def test_a_cancelled_batch_leaves_no_answer_to_the_next(pool: RenderingPool) -> None:
    """After a batch was cut off in the middle the next gets its own messages."""
    await render(pool, content(), recipients("good"), DATE, FOREVER)
    for _ in range(5):
        cut = asyncio.create_task(
            render(pool, content("cut", slow=SLOW), recipients(*["slow"] * 9), DATE, FOREVER)
        )
        await asyncio.sleep(0)
        cut.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cut
        of = content()
        expected = Renderer(of, "bounce.test").render(recipients("good")[0], DATE)
        assert await render(pool, of, recipients("good"), DATE, FOREVER) == [expected]


async def test_signals_of_a_drain_do_not_end_it(pool: RenderingPool) -> None:
    """SIGTERM and SIGINT to all processes of a unit leave the rendering ones for the drain, in a session of their own."""
    await render(pool, content(), recipients("good"), DATE, FOREVER)
    before = workers()
    for worker in before:
        os.kill(worker, signal.SIGTERM)
        os.kill(worker, signal.SIGINT)
        assert os.getsid(worker) != os.getsid(0)
    assert shape(await render(pool, content(), recipients("good"), DATE, FOREVER)) == [None]
    assert workers() == before


async def test_it_knows_no_secret(pool: RenderingPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rendering process has nothing of the agent's environment, in which the database's password may stand."""
    monkeypatch.setenv("FAIRPOST_DATABASE", "postgresql://secret")
    await render(pool, content(), recipients("good"), DATE, FOREVER)
    (worker,) = workers()
    environment = Path(f"/proc/{worker}/environ").read_text()  # noqa: ASYNC240  no disk
    assert [line.split("=")[0] for line in environment.split("\0") if line] == ["PYTHONPATH"]


@pytest.mark.parametrize("program", ["/nowhere/python", "/bin/false"])
async def test_without_a_process_nothing_is_refused(
    pool: RenderingPool,
    program: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While no process can be started nothing is answered, and one line says why; then it goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", program)
        assert await render(pool, content(), recipients("good"), DATE, FOREVER) == []
    assert caplog.text.count("no rendering process: ") == 1
    assert shape(await render(pool, content(), recipients("good"), DATE, FOREVER)) == [None]


def test_no_bounce_domain() -> None:
    """A pool whose bounce domain is none is refused at once."""
    with pytest.raises(AddressError):
        RenderingPool("no domain")


async def test_an_agent_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    """After `kill -9` of an agent its rendering processes end, whether they were idle or in the middle of a loop."""
    program = tmp_path / "agent.py"
    program.write_text(
        dedent("""
            import uvloop
            from tests.integration import test_rendering_pool as t

            async def main():
                pool = t.RenderingPool("bounce.test")
                of = t.content(bad=t.LOOP)
                while True:
                    await t.render(pool, t.content("d"), t.recipients("good"), t.DATE, t.FOREVER)
                    await t.render(pool, of, t.recipients("bad"), t.DATE, t.FOREVER)

            uvloop.run(main())
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    agent = await asyncio.create_subprocess_exec(sys.executable, program, env=environment)
    try:
        await until(lambda: len(workers(agent.pid)) == 2)
        left = workers(agent.pid)
    finally:
        agent.kill()
        await agent.wait()
    await until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in left))
