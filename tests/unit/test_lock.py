"""The lock file: what is installed is what was locked, octet by octet."""

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REQUIREMENTS = [
    *PROJECT["project"]["dependencies"],
    *(each for extra in PROJECT["project"]["optional-dependencies"].values() for each in extra),
    *PROJECT["build-system"]["requires"],
]
_LOCKED = re.compile(
    r"(?P<name>[a-z0-9-]+)==(?P<version>[0-9A-Za-z.!+-]+) (?P<hashes>(?:\\\n    --hash=sha256:[0-9a-f]{64} ?)+)\n"
)


def locked() -> dict[str, str]:
    """The versions in the lock file by name; it holds nothing else."""
    lines = (ROOT / "requirements.lock").read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))
    entries = list(_LOCKED.finditer(text))
    assert "".join(entry[0] for entry in entries) == text, "something stands there without a hash"
    versions = {entry["name"]: entry["version"] for entry in entries}
    assert len(versions) == len(entries)
    return versions


@pytest.mark.parametrize("text", REQUIREMENTS)
def test_every_dependency_is_locked(text: str) -> None:
    """What pyproject.toml asks for, its extras too, has one version within its range, with the hashes of its files."""
    requirement = Requirement(text)
    assert requirement.url is None
    assert requirement.specifier.contains(locked()[canonicalize_name(requirement.name)])


def test_what_is_installed_is_what_was_locked() -> None:
    """Each package of the lock file is installed, in its version."""
    known = locked()
    installed = {canonicalize_name(found.name): found.version for found in distributions()}
    assert {name: installed.get(canonicalize_name(name)) for name in known} == known
