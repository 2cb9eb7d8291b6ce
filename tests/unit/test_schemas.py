"""The contract for other languages is that of the code."""

from importlib.metadata import version
from pathlib import Path

from contract.schemas import TOPICS, documents, json_schema

DOCS = Path(__file__).parents[2] / "docs" / "events"


def test_the_documents_are_those_of_the_code() -> None:
    """docs/events is what `python -m contract.schemas docs/events` writes now."""
    made = documents(version("fairpost"))
    assert {path.name: path.read_bytes() for path in DOCS.glob("*.json")} == made


def test_every_topic_has_its_fields() -> None:
    """A schema names the fields of its records, and which of them must be there."""
    due = json_schema("due-emails")["$defs"]["DueEmail"]
    assert due["required"] == ["user_id", "campaign_id", "email_key", "email"]
    assert set(due["properties"]) == {*due["required"], "variables", "not_after"}
    assert "class" in json_schema("delivery-status")["$defs"]["DeliveryStatus"]["properties"]
    assert len(TOPICS) == 6
