"""The contract for other languages: JSON Schema of each topic's records, and AsyncAPI of all topics.

`python -m contract.schemas FOLDER` writes them; what the code checks beyond types stands in the descriptions.
"""

import sys
from collections.abc import Mapping
from inspect import getdoc
from pathlib import Path
from typing import Any, Final

import msgspec

from contract import events

TOPICS: Final[Mapping[str, tuple[Any, str, str]]] = {
    events.CAMPAIGNS: (events.CampaignEvent, "campaign_id", "receive"),
    events.DUE_EMAILS: (events.DueEmail, "user_id", "receive"),
    events.SEND_EMAILS: (events.SendEmail, "user_id", "send"),
    events.DELIVERY_LOG: (events.DeliveryLogRecord, "instance", "receive"),
    events.DELIVERY_STATUS: (events.DeliveryStatus, "user_id", "send"),
    events.DEAD_LETTERS: (events.DeadLetter, "the record's topic", "send"),
}
"""By topic: the type of its records, their key, and what fairpost does with it."""


def json_schema(topic: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a topic's records."""
    kind, _, _ = TOPICS[topic]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": topic,
        **msgspec.json.schema(kind),
    }


def asyncapi(version: str) -> dict[str, Any]:
    """The AsyncAPI 3.0 document of all topics; a message's payload is its JSON Schema beside it."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "fairpost",
            "version": version,
            "description": getdoc(events) or "",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": {
            topic: {
                "address": topic,
                "messages": {
                    "record": {
                        "summary": f"Keyed by {key}.",
                        "payload": {"$ref": f"./{topic}.schema.json"},
                    }
                },
            }
            for topic, (_, key, _) in TOPICS.items()
        },
        "operations": {
            f"{action}_{topic.replace('-', '_')}": {
                "action": action,
                "channel": {"$ref": f"#/channels/{topic}"},
            }
            for topic, (_, _, action) in TOPICS.items()
        },
    }


def documents(version: str) -> dict[str, bytes]:
    """Every file, by name."""
    made = {f"{topic}.schema.json": json_schema(topic) for topic in TOPICS}
    made["asyncapi.json"] = asyncapi(version)
    return {
        name: msgspec.json.format(msgspec.json.encode(document, order="deterministic"), indent=2)
        + b"\n"
        for name, document in made.items()
    }


def main(folder: Path, version: str) -> None:
    """Writes every file into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in documents(version).items():
        (folder / name).write_bytes(text)


if __name__ == "__main__":
    from importlib.metadata import version as version_of

    main(Path(sys.argv[1]), version_of("fairpost"))
