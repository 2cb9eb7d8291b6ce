"""The agent as a service manager runs it: a user of its own without any privilege, with its own database role."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from testbed.ports import accepts, reserve_port
from testbed.processes import Process
from tests.acceptance.conftest import House

Build = Callable[..., House]

PROJECT = Path(__file__).parents[2]
USER = 65533
"""Nobody's, so that no file of the machine is its own."""

# What `User=`, `SupplementaryGroups=postdrop`, `NoNewPrivileges=yes` and an empty `CapabilityBoundingSet=` do.
UNPRIVILEGED = [
    "setpriv",
    *(f"--reuid={USER}", f"--regid={USER}", "--groups=postdrop"),
    *("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--pdeathsig=KILL"),
    "--",
]
AGENT = ["-c", "from smtp_agent.cli import main; main()"]

WHO = """
SELECT DISTINCT usename, rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls,
       ARRAY(SELECT roleid::regrole::text FROM pg_auth_members WHERE member = pg_roles.oid)
  FROM pg_stat_activity JOIN pg_roles ON rolname = usename
 WHERE datname = current_database() AND starts_with(application_name, 'fairpost agent ')"""


def test_an_agent_without_privileges_does_all_its_work(build: Build) -> None:
    """Without root, capabilities or setuid programs, as member of fairpost_agent only, it fences, sends and lists the queue."""
    house = build({"gmail": None})
    [host] = house.hosts.values()
    house.processes["worker"] = house.installation.start_worker()
    house.processes["tracker"] = house.installation.start_tracker()
    locks = house.installation.directory / "locks"
    locks.mkdir()
    os.chown(locks, USER, USER)
    port = reserve_port()
    command = [*UNPRIVILEGED, interpreter(), *AGENT]
    environment = {
        # All that this interpreter sees, for one that is not of its virtual environment.
        "PYTHONPATH": os.pathsep.join([str(PROJECT), *filter(None, sys.path)]),
        **house.installation.agent_environment(host),
        "FAIRPOST_LOCK_DIRECTORY": str(locks),
        "FAIRPOST_METRICS_PORT": str(port),
    }
    log = house.installation.directory / "agent.log"
    agent = Process("agent", [*command, "run"], log=log, environment=environment)
    agent.start(lambda: accepts(port))
    try:
        house.publish_campaign("c")
        house.publish_due("c", ["a@gmail.test", "defer.b@gmail.test"])
        house.wait_for_states("c", {"sent": 1, "deferred": 1})
        house.wait_for(
            lambda: ask(command, environment, "status")["queue"] == {"gmail": 1},
            "a listing of the queue",
        )

        status = Path(f"/proc/{agent.pid}/status").read_text()
        assert (
            re.findall(r"^(?:Uid|Gid):\t(.*)$", status, re.MULTILINE)
            == ["\t".join([str(USER)] * 4)] * 2
        )
        assert re.findall(r"^Cap(?:Prm|Eff|Bnd|Amb):\t0*(.*)$", status, re.MULTILINE) == [""] * 4
        assert "NoNewPrivs:\t1" in status
        assert house.query(WHO) == [("agent", False, ["fairpost_agent"])]
        assert house.query("SELECT DISTINCT reason FROM fences WHERE confirmed_at IS NOT NULL") == [
            ("start",)
        ]
        house.installation.fairpost_agent(host, "postfix-config", "--apply")
        assert {
            check["what"]: check["found"]
            for check in ask(command, environment, "check")
            if not check["ok"]
        } == {}
    finally:
        agent.stop()
    assert agent.exit_code == 0
    assert not re.search("WARNING|ERROR", log.read_text())


def interpreter() -> str:
    """A Python of this version that the user may execute: this one, or the system's where this is in root's home."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (sys.executable, shutil.which(version, path="/usr/local/bin:/usr/bin")):
        if (
            path
            and subprocess.run([*UNPRIVILEGED, "test", "-x", path], check=False).returncode == 0
        ):
            return path
    pytest.skip(f"no {version} that every user may execute; install Debian's {version}")


def ask(agent: Sequence[str], environment: dict[str, str], command: str) -> Any:
    """What a command of the agent's answers its own user."""
    done = subprocess.run(
        [*agent, command, "--json"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    return json.loads(done.stdout)
