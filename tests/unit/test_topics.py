"""The topics of an installation: what must be true of each."""

import pytest
from pydantic import SecretStr

from contract import events
from processor.settings import ProcessorSettings
from processor.topics import topic_specs


@pytest.mark.parametrize("prefix", ["", "eu."])
@pytest.mark.parametrize("partitions", [1, 12])
def test_topic_specs(prefix: str, partitions: int) -> None:
    """Every topic once, under the installation's prefix; one partition where order rests on it."""
    settings = ProcessorSettings(
        database=SecretStr(""), kafka_bootstrap_servers="k", topic_prefix=prefix
    )
    specs = {spec.name: spec for spec in topic_specs(settings, partitions=partitions)}
    assert set(specs) == set(settings.topics)
    assert {name.removeprefix(prefix): spec.partitions for name, spec in specs.items()} == {
        events.CAMPAIGNS: 1,
        events.DUE_EMAILS: partitions,
        events.SEND_EMAILS: partitions,
        events.DELIVERY_LOG: partitions,
        events.DELIVERY_STATUS: partitions,
        events.DEAD_LETTERS: 1,
    }
    fixed = {name for name, spec in specs.items() if spec.fixed}
    assert fixed == {prefix + events.CAMPAIGNS, prefix + events.DELIVERY_LOG}
    # Which campaign event is newer is judged by append time.
    assert specs[prefix + events.CAMPAIGNS].config["message.timestamp.type"] == "LogAppendTime"
    for spec in specs.values():
        assert int(spec.config["retention.ms"]) >= 7 * 24 * 3600 * 1000
