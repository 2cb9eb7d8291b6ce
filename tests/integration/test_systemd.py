"""The units are what systemd takes without a word, and leave the services little that they could do to the host."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from smtp_agent.settings import AgentSettings
from testbed.processes import find_program

SYSTEMD = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS = sorted(unit.name for unit in SYSTEMD.glob("*.service"))
AFTER_DRAIN_SECONDS = 15
"""What a drained agent may take to end."""


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with this environment's programs in the place of /opt/fairpost's, which systemd looks for."""
    folder = tmp_path / "systemd"
    shutil.copytree(SYSTEMD, folder)
    for unit in UNITS:
        text = (folder / unit).read_text()
        (folder / unit).write_text(
            text.replace("/opt/fairpost/bin", str(Path(sys.executable).parent))
        )
    return folder


def analyze(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs systemd-analyze(1)."""
    command = [find_program("systemd-analyze"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("unit", UNITS)
def test_units_are_verified(units: Path, unit: str) -> None:
    """Systemd understands every line, and finds every program."""
    done = analyze("verify", "--man=no", f"./{unit}", cwd=units)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS)
def test_units_expose_little(units: Path, unit: str) -> None:
    """By systemd's own reckoning each service's exposure is well under 3 of 10."""
    arguments = ("--offline=true", "--threshold=20", "--json=short")
    done = analyze("security", *arguments, f"./{unit}", cwd=units)
    assert done.returncode == 0, done.stderr
    weak = {row["name"] for row in json.loads(done.stdout) if not row["set"] and row["exposure"]}
    # What is left: they speak to other hosts and local sockets, and look at the host as it is.
    assert not {name for name in weak if "Protect" in name or "NoNewPrivileges" in name}


def test_no_program_is_forgotten() -> None:
    """Each process that is to run for ever has its unit."""
    started = {
        match[1]
        for unit in UNITS
        for match in re.finditer(
            r"^ExecStart=/opt/fairpost/bin/(.*)$", (SYSTEMD / unit).read_text(), re.MULTILINE
        )
    }
    assert started == {"fairpost worker", "fairpost tracker", "fairpost-agent run"}


def test_a_drain_is_given_its_time() -> None:
    """Systemd does not kill an agent that drains as long as it may by default."""
    [seconds] = re.findall(
        r"^TimeoutStopSec=(\d+)$", (SYSTEMD / "fairpost-agent.service").read_text(), re.MULTILINE
    )
    assert int(seconds) >= AgentSettings.model_fields["drain_seconds"].default + AFTER_DRAIN_SECONDS


def test_settings_are_nobody_elses_to_read(tmp_path: Path) -> None:
    """The user is made, and files with passwords become root's to write, the service's to read, and nobody else's."""
    folder = tmp_path / "etc" / "fairpost"
    folder.mkdir(parents=True)
    files = [folder / "fairpost.toml", folder / "fairpost.env"]
    for file in files:
        file.touch(0o644)
    root = f"--root={tmp_path}"
    for program, *arguments in (
        ("systemd-sysusers", root, str(SYSTEMD / "fairpost.sysusers")),
        ("systemd-tmpfiles", root, "--create", str(SYSTEMD / "fairpost.tmpfiles")),
    ):
        command = [find_program(program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    groups = (tmp_path / "etc" / "group").read_text()
    [gid] = re.findall(r"^fairpost:\w*:(\d+):", groups, re.MULTILINE)
    for file in files:
        status = file.stat()
        assert (status.st_mode & 0o777, status.st_uid, status.st_gid) == (0o640, 0, int(gid))
