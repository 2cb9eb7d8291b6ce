"""A process that renders messages for an agent or a command, `python -m contract.rendering_worker BOUNCE_DOMAIN`.

It reads jobs from standard input and answers each on standard output, as frames of a length and as many octets; an
empty frame says that it is ready. It ends with its input, so never outlives its parent; the signals that drain an agent
do not end it, as a drain still renders.

The kernel holds it to its limits: a message that takes too much CPU time ends the process by a signal that nothing
within it handles, so that no C call is too long either. One that takes too much memory is told so by Python.
"""

import logging
import os
import pickle
import resource
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import BinaryIO, Final

import msgspec
from msgspec import Struct

from contract.rendering import Content, Recipient, Rendered, Renderer, RenderingError

logger = logging.getLogger(__name__)

COMPILING_SECONDS: Final = 1.0
"""CPU time to compile the templates of one `email_key`; half a megabyte of HTML takes about half of it."""
COMPILING_SIGNAL: Final = signal.SIGVTALRM
"""Ends the process when compiling takes longer."""
RENDERING_SECONDS: Final = 0.25
"""CPU time to render one message; usual ones take less than a thousandth of it."""
RENDERING_SIGNAL: Final = signal.SIGPROF
"""Ends the process when rendering takes longer."""
MEMORY: Final = 512 * 2**20
"""Octets of address space; an idle process has 30 MiB, 75 MiB with the largest message."""
SLICE_SECONDS: Final = 0.02
"""CPU time after which a job ends, though more of its messages are wanted: others wait for their turn."""

LENGTH: Final = 4
"""Octets of a frame's length, the most significant first."""

_RENDERERS: Final = 64
"""Campaigns whose compiled templates are kept: more than an instance has lanes."""


class Job(Struct, frozen=True):
    """Messages of one campaign to render; they have one date."""

    content: Content
    recipients: Sequence[Recipient]
    date: datetime


class Done(Struct, frozen=True):
    """What came of a job.

    Attributes:
        answers: to the first of its recipients, at least one: the message, or in one line why there is none.
        longest: seconds of CPU time that the slowest took, without compiling its templates for all.
    """

    answers: list[Rendered | str]
    longest: float


class _Renderers:
    """Compiled templates of the campaigns that were rendered last."""

    def __init__(self, bounce_domain: str) -> None:
        self._bounce_domain = bounce_domain
        self._kept: OrderedDict[tuple[str, int], Renderer] = OrderedDict()

    def get(self, content: Content) -> Renderer:
        key = content.campaign_id, content.revision
        renderer = self._kept.get(key)
        if renderer is None:
            renderer = self._kept[key] = Renderer(content, self._bounce_domain)
            if len(self._kept) > _RENDERERS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return renderer


def render(job: Job, renderer: Renderer) -> Done:
    """Renders for one slice of CPU time, one message at least."""
    answers: list[Rendered | str] = []
    longest = 0.0
    end = time.process_time() + SLICE_SECONDS
    for recipient in job.recipients:
        answer, seconds = _answer(renderer, recipient, job.date)
        answers.append(answer)
        longest = max(longest, seconds)
        if time.process_time() > end:
            break
    return Done(answers, longest)


def _answer(
    renderer: Renderer, recipient: Recipient, date: datetime
) -> tuple[Rendered | str, float]:
    """The message or why there is none, and the CPU time it took once its templates were compiled."""
    answer: Rendered | str
    began = time.process_time()
    try:
        if not renderer.is_compiled(recipient.email_key):
            with _limit(signal.ITIMER_VIRTUAL, COMPILING_SECONDS):
                renderer.compile(recipient.email_key)
            began = time.process_time()
        with _limit(signal.ITIMER_PROF, RENDERING_SECONDS):
            answer = renderer.render(recipient, date)
    except RenderingError as error:
        answer = str(error)
    except Exception as error:  # noqa: BLE001  whatever it is, it must not stop the others
        kind = type(error).__name__
        logger.error("dispatch %d cannot be rendered: %s", recipient.dispatch_id, kind)  # noqa: TRY400
        answer = f"cannot be rendered: {kind}"
    return answer, time.process_time() - began


@contextmanager
def _limit(timer: int, seconds: float) -> Iterator[None]:
    """Lets the kernel end the process when what is within takes longer by that timer."""
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)


def serve(jobs: BinaryIO, answers: BinaryIO, bounce_domain: str) -> None:
    """Answers job after job until there are no more, or nobody reads the answers."""
    renderers = _Renderers(bounce_domain)
    encoder = msgspec.msgpack.Encoder()
    answer = b""
    try:
        while True:
            answers.write(len(answer).to_bytes(LENGTH))
            answers.write(answer)
            answers.flush()
            length = int.from_bytes(jobs.read(LENGTH))
            frame = jobs.read(length)
            if not length or len(frame) < length:
                return
            job: Job = pickle.loads(frame)  # noqa: S301  its parent's own
            answer = encoder.encode(render(job, renderers.get(job.content)))
    except BrokenPipeError:
        return


def main() -> None:
    """Serves the process that started this one."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    for limiting in (COMPILING_SIGNAL, RENDERING_SIGNAL):
        signal.signal(limiting, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # Neither recipients nor contents belong on a disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    bounce_domain, niceness = sys.argv[1:]
    os.nice(int(niceness))
    serve(sys.stdin.buffer, sys.stdout.buffer, bounce_domain)
    # Python would complain of what nobody read.
    os._exit(0)


if __name__ == "__main__":
    main()
