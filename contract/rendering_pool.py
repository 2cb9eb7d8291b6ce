"""The rendering pool: messages are rendered in processes of their own, within limits of time, memory and size.

Two processes do it. Nearly all campaigns share the first, a slice of CPU time each in turn. A campaign that hit a limit
or is slow is rendered apart until its content changes: in the second process, message by message, with less priority.
So a template that never ends costs its own message only, and other campaigns a moment, once.
"""

import asyncio
import logging
import math
import os
import pickle
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final

import msgspec

from contract import rendering_worker
from contract.addresses import mail_domain
from contract.outage import first_line
from contract.rendering import Content, Recipient, Rendered, fault
from contract.rendering_worker import (
    COMPILING_SECONDS,
    COMPILING_SIGNAL,
    LENGTH,
    RENDERING_SECONDS,
    RENDERING_SIGNAL,
    Done,
    Job,
)

logger = logging.getLogger(__name__)

SLOW_SECONDS: Final = 0.1
"""CPU time of one message that has its campaign rendered apart."""
BATCH_OCTETS: Final = 32 * 2**20
"""Of a batch no more is rendered beyond this, so that the agent can hold what its lanes hand over."""

_SLICE: Final = 50
"""Messages that are asked for at once: a batch's first go out while its others are rendered."""
_START_SECONDS: Final = 30.0
"""A process starts in a tenth of a second of CPU time."""
_SILENCE_SECONDS: Final = 30.0
"""The limits of CPU time end a process long before, unless it is stopped, or the machine is hardly there."""
_APART: Final = 1024
"""Campaigns that are remembered to be rendered apart."""
_NICENESS: Final = 10
"""Of the process apart."""

_LIMITS: Final[dict[int, str]] = {
    COMPILING_SIGNAL: f"compiling took longer than {COMPILING_SECONDS:g} s of CPU time",
    RENDERING_SIGNAL: f"rendering took longer than {RENDERING_SECONDS:g} s of CPU time",
}


class RenderingPool:
    """Renders for the lanes of an agent, or for a person to see; its processes are started when they are needed.

    Args:
        bounce_domain: of the envelope senders.

    Raises:
        AddressError: the bounce domain is no domain.
    """

    def __init__(self, bounce_domain: str) -> None:
        domain = mail_domain(bounce_domain)
        self._common = _RenderingProcess(domain, niceness=0)
        self._solitary = _RenderingProcess(domain, niceness=_NICENESS)
        self._apart: OrderedDict[str, int] = OrderedDict()

    async def render(
        self, content: Content, recipients: Sequence[Recipient], date: datetime, deadline: float
    ) -> AsyncIterator[list[Rendered | str]]:
        """Renders the messages of one campaign, in their order, and yields them slice by slice.

        Yields to the first recipients: the message, or in one line why there is none for good. The others were not
        rendered: the deadline (of the monotonic clock) came, they make too many octets together, or there is no
        rendering process, which is logged.
        """
        done = octets = 0
        try:
            while done < len(recipients) and octets <= BATCH_OCTETS:
                job = Job(content, recipients[done : done + _SLICE], date)
                answers = await (
                    self._render_one(job, deadline)
                    if self._apart.get(content.campaign_id) == content.revision
                    else self._render_slice(job, deadline)
                )
                done += len(answers)
                octets += sum(
                    len(answer.message) for answer in answers if isinstance(answer, Rendered)
                )
                if answers:
                    yield answers
        except TimeoutError:
            pass
        except NoProcessError as error:
            logger.error("no rendering process: %s", error)  # noqa: TRY400  the whole story

    async def render_apart(
        self, content: Content, recipient: Recipient, date: datetime
    ) -> Rendered | str:
        """Renders one message apart: the message, or in one line why there is none for good.

        Raises:
            NoProcessError: there is no process that answers.
        """
        [answer] = await self._render_one(Job(content, [recipient], date), math.inf)
        return answer

    async def _render_slice(self, job: Job, deadline: float) -> list[Rendered | str]:
        try:
            done = await self._common.do(job, deadline)
        except (_PoisonError, _SilentError) as error:
            self._set_apart(job.content, str(error))
            return []
        if done.longest > SLOW_SECONDS:
            self._set_apart(job.content, f"a message took {done.longest:.2f} s of CPU time")
        return done.answers

    async def _render_one(self, job: Job, deadline: float) -> list[Rendered | str]:
        first = job.recipients[0]
        job = msgspec.structs.replace(job, recipients=[first])
        for is_last in (False, True):
            try:
                return (await self._solitary.do(job, deadline)).answers
            except _PoisonError as error:
                # Somebody may have killed one process; but what ends two is the message.
                if error.is_certain or is_last:
                    return [fault(job.content.campaign_id, first.email_key, str(error))]
        raise AssertionError

    async def close(self) -> None:
        """Ends the processes; whoever is still waiting for them gets no answer."""
        await asyncio.gather(self._common.close(), self._solitary.close())

    def _set_apart(self, content: Content, why: str) -> None:
        if self._apart.get(content.campaign_id) != content.revision:
            logger.warning(
                "campaign %s is rendered apart until it changes: %s", content.campaign_id, why
            )
        self._apart[content.campaign_id] = content.revision
        self._apart.move_to_end(content.campaign_id)
        if len(self._apart) > _APART:
            self._apart.popitem(last=False)


class NoProcessError(Exception):
    """There is no process that answers; one line."""


class _SilentError(NoProcessError):
    """A process did not answer, and is no more."""


class _PoisonError(Exception):
    """A message of a job, the only one if it has one, cannot be rendered; one line.

    Args:
        why: the line.
        is_certain: whether nothing else can be the reason.
    """

    def __init__(self, why: str, *, is_certain: bool) -> None:
        super().__init__(why)
        self.is_certain = is_certain


def _poison(code: int) -> _PoisonError:
    """What ended a process with an exit code, which is negative for a signal."""
    if limit := _LIMITS.get(-code):
        return _PoisonError(limit, is_certain=True)
    return _PoisonError(f"rendering ended its process ({_name(code)})", is_certain=False)


def _name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


class _RenderingProcess:
    """A process that does one job at a time, started when it is needed, and anew when it was lost."""

    def __init__(self, bounce_domain: str, *, niceness: int) -> None:
        self._arguments = (bounce_domain, str(niceness))
        self._turn = asyncio.Lock()
        self._process: Process | None = None
        self._decoder = msgspec.msgpack.Decoder(Done)

    async def do(self, job: Job, deadline: float) -> Done:
        """Does a slice of a job when its turn has come; who waits longest is next.

        Raises:
            TimeoutError: its turn did not come by the deadline.
            NoProcessError: there is no process.
            _SilentError: the process did not answer.
            _PoisonError: the job ended the process, or cannot be told to it.
        """
        if (seconds := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        async with asyncio.timeout(seconds):
            await self._turn.acquire()
        try:
            return await self._do(pickle.dumps(job, pickle.HIGHEST_PROTOCOL))
        except RecursionError:
            raise _PoisonError("variables: they are nested too deep", is_certain=True) from None
        finally:
            self._turn.release()

    async def close(self) -> None:
        """Ends it when its job is done."""
        async with self._turn:
            process, self._process = self._process, None
            if process is not None:
                await _kill(process)

    async def _do(self, job: bytes) -> Done:
        # Whoever leaves here without an answer leaves no process that would give it to the next.
        process, self._process = await self._running(), None
        try:
            async with asyncio.timeout(_SILENCE_SECONDS):
                answer = await _ask(process, job)
        except TimeoutError:
            await _kill(process)
            raise _SilentError(f"no answer in {_SILENCE_SECONDS:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise _poison(await _ended(process)) from None
        except BaseException:
            await _kill(process)
            raise
        self._process = process
        return self._decoder.decode(answer)

    async def _running(self) -> Process:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdout is not None  # noqa: S101  it is a pipe
            if not process.stdout.at_eof():
                return process
            code = await _ended(process)
            logger.warning("an idle rendering process ended (%s)", _name(code))
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", rendering_worker.__name__, *self._arguments),
                stdin=PIPE,
                stdout=PIPE,
                # Templates are to be near no secret, so it gets none.
                env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
        except OSError as error:
            raise NoProcessError(first_line(error)) from None
        try:
            async with asyncio.timeout(_START_SECONDS):
                await _read(process)
        except TimeoutError:
            await _kill(process)
            raise NoProcessError(f"it was not ready in {_START_SECONDS:g} s") from None
        except asyncio.IncompleteReadError:
            raise NoProcessError(
                f"it ended at its start ({_name(await _ended(process))})"
            ) from None
        except BaseException:
            await _kill(process)
            raise
        return process


async def _ask(process: Process, job: bytes) -> bytes:
    assert process.stdin is not None  # noqa: S101  it is a pipe
    process.stdin.write(len(job).to_bytes(LENGTH))
    process.stdin.write(job)
    await process.stdin.drain()
    return await _read(process)


async def _read(process: Process) -> bytes:
    assert process.stdout is not None  # noqa: S101  it is a pipe
    length = await process.stdout.readexactly(LENGTH)
    return await process.stdout.readexactly(int.from_bytes(length))


async def _kill(process: Process) -> None:
    # Popen.kill() may reap the process before asyncio does, which then cannot tell how it ended.
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    await _ended(process)


async def _ended(process: Process) -> int:
    """Waits for its end; its exit code."""
    await process.communicate()
    assert process.returncode is not None  # noqa: S101  it has ended
    return process.returncode
