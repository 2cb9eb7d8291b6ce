"""`fairpost-agent check` on a real mail host: what is right, what is not, and what to do."""

import json
from collections.abc import Callable

from tests.acceptance.conftest import House

Build = Callable[..., House]


def test_check_tells_what_is_wrong_and_its_remedy(build: Build) -> None:
    """All is well beside a running agent, whose connections are left alone; each fault is told with its remedy."""
    house = build({"gmail": None})
    house.start()
    [host] = house.hosts.values()
    house.publish_campaign("c")
    house.publish_due("c", ["a@gmail.test"])
    house.wait_for_states("c", {"sent": 1})
    house.installation.fairpost_agent(host, "postfix-config", "--apply")
    connects = host.log.read_text().count("connect from")
    right = house.installation.fairpost_agent(host, "check")
    assert [line.split(":")[0] for line in right.stdout.splitlines()] == [
        f"ok   {what}"
        for what in (
            "machine",
            "database",
            "operators",
            "postfix",
            "queue",
            "log",
            "maxproc",
            "signing",
            "transports",
            "feed",
            "fluentd",
        )
    ]
    assert host.log.read_text().count("connect from") == connects

    house.processes[host.name].stop()
    host.fluentd.stop() if host.fluentd else None
    host.postfix.stop()
    wrong = house.installation.fairpost_agent(host, "check", "--json", check=False)
    assert wrong.returncode == 1
    found = {check["what"]: check for check in json.loads(wrong.stdout)}
    assert [what for what, check in found.items() if not check["ok"]] == [
        "postfix",
        "feed",
        "fluentd",
    ]
    assert all(check["remedy"] for check in found.values() if not check["ok"])
    assert found["postfix"]["remedy"].startswith("run `postfix -c ")
