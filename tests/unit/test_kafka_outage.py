"""Kafka's outages: what passes is waited out, what does not is told at once."""

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from processor.kafka_outage import await_answer, checked, passes


class Broker:
    """Answers with these errors, one a request, and then as asked."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.requests = 0

    def __call__(self) -> str:
        """One request."""
        self.requests += 1
        if self.codes:
            raise KafkaException(KafkaError(self.codes.pop(0)))
        return "an answer"


PASSING = [
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError._TRANSPORT,  # noqa: SLF001  its public name
]
LASTING = [
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError._INVALID_ARG,  # noqa: SLF001
]


@pytest.mark.parametrize("code", PASSING)
def test_what_passes_is_waited_out(code: int) -> None:
    """A request is repeated until Kafka answers it."""
    broker = Broker(code, code, PASSING[0])
    assert passes(KafkaError(code))
    assert await_answer(broker, 30) == "an answer"
    assert broker.requests == 4


@pytest.mark.parametrize("code", LASTING)
def test_what_does_not_pass_is_told_at_once(code: int) -> None:
    """A refusal is not asked for again."""
    broker = Broker(code)
    assert not passes(KafkaError(code))
    with pytest.raises(KafkaException) as raised:
        await_answer(broker, 30)
    assert raised.value.args[0].code() == code
    assert broker.requests == 1


def test_a_fatal_error_does_not_pass() -> None:
    """A client that is done for is not asked again."""
    assert not passes(KafkaError(KafkaError._TIMED_OUT, "done for", fatal=True))  # noqa: SLF001


def test_it_does_not_wait_for_ever() -> None:
    """When the time is over the last error is told."""
    broker = Broker(*[KafkaError.NOT_LEADER_FOR_PARTITION] * 1_000)
    with pytest.raises(KafkaException) as raised:
        await_answer(broker, 0.2)
    assert raised.value.args[0].code() == KafkaError.NOT_LEADER_FOR_PARTITION
    assert broker.requests > 1


def test_errors_of_partitions() -> None:
    """An answer is one only where no partition of it carries an error."""
    good = [TopicPartition("t", n, 17) for n in range(3)]
    assert checked(good) == good
    assert checked([]) == []
