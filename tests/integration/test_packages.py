"""The wheel and the sdist bring all that the commands need, and each extra all that its side needs and no more."""

import json
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from testbed import Testbed

PROJECT = Path(__file__).parents[2]
INSTALLED = Path(sysconfig.get_path("purelib"))
LOG = PROJECT / "tests" / "data" / "postfix-logs" / "sent.log"
DATABASE = "packages"

Run = Callable[..., subprocess.CompletedProcess[str]]


def build(source: Path, target: str, directory: Path) -> Path:
    """Builds a wheel or an sdist, without the network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(directory)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    [package] = directory.iterdir()
    return package


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of the work tree, unpacked."""
    directory = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(PROJECT, "sdist", directory / "packed")) as archive:
        archive.extractall(directory, filter="data")
    return directory / "fairpost-0.1.0"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, sdist: Path) -> Path:
    """The wheel that is built from the sdist."""
    return build(sdist, "wheel", tmp_path_factory.mktemp("wheel"))


def needs(of: Distribution, extras: Sequence[str]) -> Iterator[Distribution]:
    """What a distribution requires with these extras, and all that this requires."""
    for text in of.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            needed = distribution(requirement.name)
            yield needed
            yield from needs(needed, sorted(requirement.extras))


def install(wheel: Path, directory: Path, *extras: str) -> Run:
    """Installs it into an environment that has what its metadata asks for and nothing else; runs its programs."""
    venv.create(directory)
    python = directory / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "--no-index", "--no-deps", str(wheel)], check=True)
    site = directory / INSTALLED.relative_to(sys.prefix)
    for needed in needs(Distribution.at(site / "fairpost-0.1.0.dist-info"), extras):
        for top in {file.parts[0] for file in needed.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(INSTALLED / top)

    def run(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(directory / "bin" / program), *arguments],
            env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C.UTF-8", **variables},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def kafka_host(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A host with `fairpost[processor]`."""
    return install(wheel, tmp_path_factory.mktemp("kafka") / "venv", "processor")


@pytest.fixture(scope="module")
def mail_host(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A host with `fairpost[agent]`."""
    return install(wheel, tmp_path_factory.mktemp("mail") / "venv", "agent")


def test_both_packages_are_whole(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    """The wheel of the sdist is that of the work tree, with every file of each package; the sdist has what is deployed."""
    with (
        zipfile.ZipFile(wheel) as packed,
        zipfile.ZipFile(build(PROJECT, "wheel", tmp_path)) as direct,
    ):
        assert {f.filename: f.CRC for f in packed.infolist()} == {
            f.filename: f.CRC for f in direct.infolist()
        }
        packages = {name for name in packed.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(
        ["git", "ls-files", "contract", "processor", "smtp_agent"],
        cwd=PROJECT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert packages == set(tracked)
    for folder in ("deploy", "docs"):
        files = {f.relative_to(PROJECT) for f in (PROJECT / folder).rglob("*") if f.is_file()}
        assert {f.relative_to(sdist) for f in (sdist / folder).rglob("*") if f.is_file()} == {
            f for f in files if "__pycache__" not in f.parts
        }


def test_the_processor_migrates_and_reads_logs(kafka_host: Run, testbed: Testbed) -> None:
    """Away from the work tree, a database is made from the SQL in the wheel, and a log is read by its rules."""
    assert kafka_host("fairpost", "--version").stdout == "fairpost, version 0.1.0\n"
    where = kafka_host("python", "-c", "import contract, processor; print(contract.__file__)")
    assert str(PROJECT) not in where.stdout
    testbed.postgres.create_database(DATABASE)
    try:
        dsn = testbed.postgres.dsn(DATABASE)
        check = ("migrate", "--check", "--database", dsn)
        assert kafka_host("fairpost", *check).returncode == 1
        migrated = kafka_host("fairpost", "migrate", "--database", dsn)
        assert (migrated.returncode, migrated.stderr[-9:]) == (0, " applied\n")
        assert kafka_host("fairpost", *check).returncode == 0
    finally:
        testbed.postgres.drop_database(DATABASE)
    parsed = kafka_host("fairpost", "log", "parse", "--json", str(LOG))
    assert parsed.returncode == 0, parsed.stderr
    assert any(json.loads(line).get("status") == "sent" for line in parsed.stdout.splitlines())


def test_a_mail_host_needs_neither_faust_nor_kafka(mail_host: Run) -> None:
    """The agent's commands run where no library of the processor's is installed."""
    for library in ("faust", "aiokafka", "confluent_kafka"):
        assert mail_host("python", "-c", f"import {library}").returncode == 1
    assert "The sidecar of one Postfix" in mail_host("fairpost-agent", "--help").stdout
    settings = {
        "FAIRPOST_INSTANCE": "mx1",
        "FAIRPOST_DATABASE": "host=127.0.0.1 port=1",
        "FAIRPOST_BOUNCE_DOMAIN": "bounces.example.com",
    }
    checked = mail_host("fairpost-agent", "check", "--json", **settings)
    assert checked.returncode == 1, checked.stderr
    assert {"database", "fluentd"} <= {c["what"] for c in json.loads(checked.stdout) if not c["ok"]}
