"""A rendering process, within this one: its jobs, slices and frames."""

import io
import pickle
import time
from datetime import UTC, datetime

import msgspec
import pytest

from contract.events import Template
from contract.rendering import Content, Recipient, Rendered, Renderer
from contract.rendering_worker import LENGTH, Done, Job, render, serve

DATE = datetime(2026, 11, 30, 9, 5, 7, tzinfo=UTC)
CONTENT = Content(
    campaign_id="c",
    revision=1,
    sender="news@shop.test",
    reply_to=None,
    templates={"hello": Template(subject="Hi", text="{{ name }}")},
    unsubscribe_url=None,
    headers={},
)


def job(number: int, content: Content = CONTENT) -> Job:
    """As many messages."""
    to = [Recipient(n, f"u{n}", f"u{n}@mail.test", "hello", {"name": "x"}) for n in range(number)]
    return Job(content, to, DATE)


def frame(octets: bytes) -> bytes:
    """As it stands in the pipe."""
    return len(octets).to_bytes(LENGTH) + octets


def test_a_job_ends_with_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """When its slice of CPU time is over a job ends with the messages so far, at least one."""
    renderer = Renderer(CONTENT, "bounce.test")
    assert len(render(job(5), renderer).answers) == 5
    monkeypatch.setattr("contract.rendering_worker.SLICE_SECONDS", -1.0)
    done = render(job(5), renderer)
    assert done.answers == [renderer.render(job(5).recipients[0], DATE)]
    assert 0 <= done.longest < 1


def test_compiling_is_not_counted() -> None:
    """Templates that take long to compile, once, do not make a message slow."""
    html = "<p>Hello {{ name }}{% if name %}, and good bye{% endif %}</p>\n" * 500
    of = msgspec.structs.replace(CONTENT, templates={"hello": Template(subject="Hi", html=html)})
    began = time.process_time()
    done = render(job(1, of), Renderer(of, "bounce.test"))
    assert done.longest < (time.process_time() - began) / 4


def test_an_error_nobody_thought_of_refuses_its_own_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named without the address, in the log too, and the others are rendered."""
    usual = Renderer.render

    def broken(self: Renderer, recipient: Recipient, date: datetime) -> Rendered:
        if recipient.dispatch_id == 1:
            raise KeyError(recipient.email)
        return usual(self, recipient, date)

    monkeypatch.setattr(Renderer, "render", broken)
    first, second, third = render(job(3), Renderer(CONTENT, "bounce.test")).answers
    assert (isinstance(first, Rendered), second, isinstance(third, Rendered)) == (
        True,
        "cannot be rendered: KeyError",
        True,
    )
    assert "dispatch 1 cannot be rendered: KeyError" in caplog.text
    assert "@" not in caplog.text


def test_frames() -> None:
    """It says that it is ready, answers each job from the content that came with it, and ends with its input."""
    changed = msgspec.structs.replace(
        CONTENT, revision=2, templates={"hello": Template(subject="Hi", text="changed")}
    )
    jobs = [job(2), job(1, changed), job(1)]
    answers = io.BytesIO()
    serve(io.BytesIO(b"".join(frame(pickle.dumps(one)) for one in jobs)), answers, "bounce.test")
    answers.seek(0)
    frames = []
    while length := answers.read(LENGTH):
        frames.append(answers.read(int.from_bytes(length)))
    assert frames.pop(0) == b""
    done = [msgspec.msgpack.decode(one, type=Done) for one in frames]
    assert [one.answers for one in done] == [
        [Renderer(one.content, "bounce.test").render(to, DATE) for to in one.recipients]
        for one in jobs
    ]


@pytest.mark.parametrize("cut", [1, LENGTH, LENGTH + 1, -1])
def test_a_job_cut_off(cut: int) -> None:
    """An agent that dies while it writes a job gets no answer to it."""
    answers = io.BytesIO()
    serve(io.BytesIO(frame(pickle.dumps(job(1)))[:cut]), answers, "bounce.test")
    assert answers.getvalue() == frame(b"")
