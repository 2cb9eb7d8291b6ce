"""The listing of dead letters: what was written last comes first."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from processor.dead_letter_topic import StoredLetter, newest

AT = datetime(2026, 5, 1, tzinfo=UTC)


def stored(partition: int, offset: int, second: int) -> StoredLetter:
    """A dead letter that was written at that second."""
    return StoredLetter(
        position=f"{partition}:{offset}",
        at=AT + timedelta(seconds=second),
        topic="due-emails",
        partition=3,
        offset=17,
        reason="due-emails: why",
        value="{}",
    )


def test_the_newest_of_several_partitions() -> None:
    """What was written last comes first, wherever it stands; of one moment, what stands later."""
    letters = [
        stored(partition, offset, second)
        for partition, offset, second in ((0, 0, 1), (0, 9, 5), (0, 10, 5), (1, 0, 0), (1, 1, 7))
    ]
    assert [found.position for found in newest(letters, 4)] == ["1:1", "0:10", "0:9", "0:0"]


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 40))
def test_as_many_as_asked_for(seconds: list[int], limit: int) -> None:
    """The listing is the end of all of them in order, the other way round."""
    letters = [stored(0, offset, second) for offset, second in enumerate(sorted(seconds))]
    assert newest(iter(letters), limit) == letters[::-1][:limit]


def test_where_its_record_stood() -> None:
    """The place of the record is told in one word, apart from that of the dead letter."""
    assert (stored(0, 5, 0).position, stored(0, 5, 0).place) == ("0:5", "due-emails/3/17")
