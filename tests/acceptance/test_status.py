"""What a person sees of a running fleet: status, and a campaign with its end."""

import json
from collections.abc import Callable
from typing import Any

from tests.acceptance.conftest import House

Build = Callable[..., House]

CONTACTS = 200
LIMIT = 240


def status(house: House) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code of `fairpost status`, and its lines by name."""
    told = house.installation.fairpost("status", "--json", check=False)
    assert told.stderr == ""
    return told.returncode, {line["what"]: line for line in json.loads(told.stdout)}


def show(house: House) -> dict[str, Any]:
    """What `fairpost campaigns show` says."""
    told = house.installation.fairpost("campaigns", "show", "spring", "--json")
    [found] = json.loads(told.stdout)
    assert isinstance(found, dict)
    return found


def test_a_fleet_at_work(build: Build) -> None:
    """While mail flows all is well and the end is known; a pause is told and no alarm; the switch is one."""
    house = build({"gmail": LIMIT})
    house.start()
    house.publish_campaign("spring", finish_by="2036-01-01T00:00:00Z")
    house.publish_due("spring", [f"user{n}@gmail.test" for n in range(CONTACTS)])
    house.wait_for(lambda: house.handed("spring") > 10, "the first hand-overs")
    house.wait_for(lambda: status(house)[0] == 0, "all is well")
    _, lines = status(house)
    assert lines["pace gmail"]["found"].startswith("1 lane, ")
    assert f" of {LIMIT} a minute, " in lines["pace gmail"]["found"]

    found = show(house)
    assert found["on_time"] is True
    assert found["done_at"] is not None
    [gmail] = found["operators"]
    assert (gmail["operator"], gmail["limit"], gmail["lanes"]) == ("gmail", LIMIT, 1)

    house.installation.fairpost("operators", "pause", "gmail")
    house.wait_for(lambda: show(house)["operators"][0]["lanes"] == 0, "the chunk given back")
    assert show(house)["unknown"] == "gmail is paused"
    handed = house.handed("spring")
    code, lines = status(house)
    assert (code, lines["pace gmail"]["found"]) == (
        0,
        f"paused by a person, {CONTACTS - handed} planned",
    )
    house.installation.fairpost("sending", "off")
    code, lines = status(house)
    assert (code, lines["sending"]["ok"]) == (1, False)
    assert show(house)["unknown"] == "sending is off"
    house.installation.fairpost("sending", "on")
    house.installation.fairpost("operators", "resume", "gmail")
    house.wait_for(lambda: house.handed("spring") > handed, "it goes on")
    house.installation.fairpost("campaigns", "cancel", "spring", "--yes")
    house.wait_for_states("spring", {"planned": 0, "handed": 0, "queued": 0})
    assert show(house)["progress"] == 100
    assert show(house)["forecast"][0] == "nothing planned is left to be handed over"
    assert house.reckon().complaints == ()
