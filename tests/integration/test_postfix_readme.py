"""deploy/postfix/README.md explains what main.cf and master.cf say, all of it and nothing else."""

import shutil
import subprocess
from pathlib import Path

import pytest

from testbed.opendkim import adapt
from testbed.postfix import DEPLOY, FEED

README = (DEPLOY / "README.md").read_text()
OWN = {"bounce_domain", "dkim_milter"}
"""Parameters that Postfix does not have."""


def table(heading: str) -> dict[str, tuple[str, str]]:
    """Value and default by parameter, as the table under a heading has them."""
    section = README.partition(f"### {heading}\n")[2].partition("\n#")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    _heading, _rule, *rows = [[cell.strip().strip("`") for cell in line] for line in lines]
    assert all(why for _, _, _, why in rows)
    return {name: (here, default) for name, here, default, _ in rows}


def postconf(directory: Path, *arguments: str) -> dict[str, str]:
    """Parameters and values as Postfix lists them."""
    command = ["postconf", "-c", str(directory), *arguments]
    listing = subprocess.run(command, capture_output=True, text=True, check=True)
    assert listing.stderr == ""
    pairs = (line.partition(" =") for line in listing.stdout.splitlines())
    return {name: value.strip() for name, _, value in pairs}


@pytest.fixture(scope="module")
def defaults(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Postfix's defaults of today, as they are written, and with what they refer to in its place."""
    directory = tmp_path_factory.mktemp("defaults")
    (directory / "main.cf").write_text("compatibility_level = 3.6\n")
    (directory / "master.cf").touch()
    return [postconf(directory), postconf(directory, "-x")]


@pytest.fixture
def main_cf() -> dict[str, str]:
    """What main.cf sets."""
    parameters = postconf(DEPLOY, "-n")
    del parameters["config_directory"]
    return parameters


def test_each_parameter_of_main_cf_is_explained(main_cf: dict[str, str]) -> None:
    """The table has the parameters of main.cf and their values, and no others."""
    assert {name: here for name, (here, _) in table("main.cf").items()} == main_cf


def test_each_parameter_of_the_feed_is_explained() -> None:
    """The table has what master.cf sets for the feed and nothing else; master.cf sets nothing for other services."""
    services = postconf(DEPLOY, "-P")
    feed = {name: here for name, (here, _) in table("master.cf: the feed").items()}
    assert {f"{FEED}/{name}": value for name, value in feed.items()} == services


@pytest.mark.parametrize("heading", ["main.cf", "master.cf: the feed"])
def test_the_defaults_are_postfixs(heading: str, defaults: list[dict[str, str]]) -> None:
    """Each default in the table is Postfix's, and differs from the value here."""
    for name, (here, default) in table(heading).items():
        assert here != default, name
        if name in OWN:
            assert name not in defaults[0]
            assert default == ""
        elif name == "mynetworks":
            # Postfix computes it from the addresses of the host.
            assert default == "the host's networks"
        elif name == "compatibility_level":
            assert postconf(DEPLOY, "-d", name) == {name: default}
        else:
            assert default in {parameters[name] for parameters in defaults}, name


def test_opendkim_has_nothing_against_its_configuration(tmp_path: Path) -> None:
    """OpenDKIM takes opendkim.conf with the tables as they are shipped."""
    for file in ("key.table", "signing.table"):
        shutil.copy(DEPLOY / file, tmp_path)
    configuration = tmp_path / "opendkim.conf"
    tables = {
        "KeyTable": f"file:{tmp_path / 'key.table'}",
        "SigningTable": f"refile:{tmp_path / 'signing.table'}",
    }
    configuration.write_text(adapt((DEPLOY / "opendkim.conf").read_text(), tables))
    check = ["opendkim", "-n", "-x", str(configuration)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_commands_for_a_key_make_one_that_opendkim_uses(tmp_path: Path) -> None:
    """The commands of the README make a key that is OpenDKIM's alone, name it in both tables, and show its record."""
    commands = README.partition("## DKIM\n")[2].split("```\n")[1]
    assert "/etc/dkimkeys/" in commands
    done = subprocess.run(
        ["bash", "-euc", commands.replace("/etc/dkimkeys", str(tmp_path))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("mx1._domainkey\tIN\tTXT\t( ")
    name, value = (tmp_path / "key.table").read_text().split()
    domain, selector, file = value.split(":")
    assert (domain, selector) == ("example.com", "mx1")
    assert (tmp_path / "signing.table").read_text().split() == ["*@example.com", name]
    key = Path(file)
    assert (key.owner(), key.stat().st_mode & 0o777) == ("opendkim", 0o600)
    assert (key.parent.owner(), key.parent.stat().st_mode & 0o777) == ("opendkim", 0o700)
