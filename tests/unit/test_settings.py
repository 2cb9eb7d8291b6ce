"""Settings: the environment before the file, and one line for each way to get them wrong."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from contract import settings as settings_module
from contract.fail_points import WorkerFailPoint
from contract.settings import Settings, SettingsError, load_settings
from processor.settings import ProcessorSettings
from smtp_agent.settings import AgentSettings

SECRET = "correct-horse"
PROCESSOR = f'[processor]\ndatabase = "password={SECRET}"\nkafka_bootstrap_servers = "kafka:9092"\n'
AGENT = f'[agent]\ninstance = "a"\ndatabase = "password={SECRET}"\nbounce_domain = "b.test"\n'


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings but those of a test."""
    for name in os.environ:
        if name.upper().startswith("FAIRPOST_") or name.upper() == "SEND_EMAIL":
            monkeypatch.delenv(name)
    monkeypatch.setattr(settings_module, "DEFAULT_FILE", tmp_path / "default.toml")


def load(tmp_path: Path, kind: type[Settings], text: str) -> Settings:
    """The settings of a file with this text."""
    file = tmp_path / "fairpost.toml"
    file.write_text(text)
    return load_settings(kind, file)


def refusal(tmp_path: Path, kind: type[Settings], text: str) -> str:
    """Why a file with this text is refused."""
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, kind, text)
    assert SECRET not in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value).removeprefix(f"{tmp_path}/")


def processor(tmp_path: Path, text: str = "") -> ProcessorSettings:
    """The processor's settings with these in addition."""
    loaded = load(tmp_path, ProcessorSettings, PROCESSOR + text)
    assert isinstance(loaded, ProcessorSettings)
    return loaded


def agent(tmp_path: Path, text: str = "") -> AgentSettings:
    """The agent's settings with these in addition."""
    loaded = load(tmp_path, AgentSettings, AGENT + text)
    assert isinstance(loaded, AgentSettings)
    return loaded


# ------------------------------------------------------------------ where they come from


def test_each_side_reads_its_table(tmp_path: Path) -> None:
    """One file serves both sides; neither sees the other's table."""
    both = PROCESSOR + AGENT
    worker = load(tmp_path, ProcessorSettings, both)
    sidecar = load(tmp_path, AgentSettings, both)
    assert isinstance(worker, ProcessorSettings)
    assert isinstance(sidecar, AgentSettings)
    assert worker.kafka_bootstrap_servers == "kafka:9092"
    assert sidecar.bounce_domain == "b.test"
    assert sidecar.database.get_secret_value() == f"password={SECRET}"


def test_the_environment_goes_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable replaces the file's value, and what it does not name stays."""
    monkeypatch.setenv("FAIRPOST_BATCH_SIZE", "7")
    monkeypatch.setenv("FAIRPOST_KAFKA_BOOTSTRAP_SERVERS", "other:9092")
    loaded = processor(tmp_path, "batch_size = 5\nreservation_block_size = 3\n")
    assert loaded.batch_size == 7
    assert loaded.kafka_bootstrap_servers == "other:9092"
    assert loaded.reservation_block_size == 3


def test_the_environment_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file the variables are all."""
    monkeypatch.setenv("FAIRPOST_DATABASE", "dbname=x")
    monkeypatch.setenv("FAIRPOST_KAFKA_BOOTSTRAP_SERVERS", "kafka:9092")
    loaded = load_settings(ProcessorSettings, None)
    assert loaded.database.get_secret_value() == "dbname=x"


def test_the_default_file_is_read_where_it_is(tmp_path: Path) -> None:
    """Without a file's name the default file counts; it need not be there, a named one must."""
    with pytest.raises(SettingsError, match=r"^database: is not set"):
        load_settings(ProcessorSettings, None)
    (tmp_path / "default.toml").write_text(PROCESSOR)
    assert load_settings(ProcessorSettings, None).kafka_bootstrap_servers == "kafka:9092"
    with pytest.raises(SettingsError, match=r"/none\.toml: no such file$"):
        load_settings(ProcessorSettings, tmp_path / "none.toml")


@pytest.mark.parametrize("variable", ["SEND_EMAIL", "FAIRPOST_SEND_EMAIL"])
@pytest.mark.parametrize(
    ("text", "sends"),
    [("false", False), ("0", False), ("no", False), ("true", True), ("1", True), ("TRUE", True)],
)
def test_send_email_by_either_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, text: str, *, sends: bool
) -> None:
    """The switch of both sides is understood under both names, whatever the file says."""
    monkeypatch.setenv(variable, text)
    for line in ("", "send_email = true\n", "send_email = false\n"):
        assert processor(tmp_path, line).send_email == sends
        assert agent(tmp_path, line).send_email == sends


def test_send_email_from_the_file(tmp_path: Path) -> None:
    """The file can switch sending off."""
    assert processor(tmp_path).send_email
    assert not processor(tmp_path, "send_email = false\n").send_email
    assert not agent(tmp_path, "send_email = false\n").send_email


@pytest.mark.parametrize(
    ("text", "names"),
    [("gmail", ("gmail",)), ("gmail, wp,", ("gmail", "wp")), ("", ()), (" , ", ())],
)
def test_operators_are_one_variable_with_commas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, names: tuple[str, ...]
) -> None:
    """A list in the file, a string with commas in the environment."""
    assert agent(tmp_path, 'operators = ["a", "b"]\n').operators == ("a", "b")
    monkeypatch.setenv("FAIRPOST_OPERATORS", text)
    assert agent(tmp_path, 'operators = ["a", "b"]\n').operators == names


@pytest.mark.parametrize("kind", [ProcessorSettings, AgentSettings])
def test_a_secret_may_stand_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Settings]
) -> None:
    """A file stands for the secret that it holds, whether the settings file or the environment names it."""
    text = (PROCESSOR if kind is ProcessorSettings else AGENT).replace(
        f'database = "password={SECRET}"\n', ""
    )
    (tmp_path / "from-file").write_text("dbname=file\n")
    (tmp_path / "from-environment").write_text("dbname=environment")
    named = text + f'database_file = "{tmp_path}/from-file"\n'
    loaded = load(tmp_path, kind, named)
    assert getattr(loaded, "database").get_secret_value() == "dbname=file"  # noqa: B009  of both
    monkeypatch.setenv("FAIRPOST_DATABASE_FILE", f"{tmp_path}/from-environment")
    for given in (named, PROCESSOR if kind is ProcessorSettings else AGENT):
        loaded = load(tmp_path, kind, given)
        assert getattr(loaded, "database").get_secret_value() == "dbname=environment"  # noqa: B009


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "No such file or directory"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"\xff\xfe", "is no text"),
    ],
)
def test_secret_files_that_hold_none(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    """A file without a secret is refused in one line that names it."""
    secret = tmp_path / "secret"
    if content is not None:
        secret.write_bytes(content)
    text = PROCESSOR + f'kafka_sasl_password_file = "{secret}"\n'
    assert refusal(tmp_path, ProcessorSettings, text) == (
        f"kafka_sasl_password_file: {secret}: {complaint}"
    )


def test_a_secret_and_its_file_are_one_too_many(tmp_path: Path) -> None:
    """Where both stand in one place, nobody can know which is meant."""
    text = PROCESSOR + 'database_file = "/nowhere"\n'
    assert refusal(tmp_path, ProcessorSettings, text) == (
        "database, database_file: both are set; take one away"
    )


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ('kafka_security_protocol = "SASL_SSL"', "SASL_SSL needs kafka_sasl_username and"),
        (
            'kafka_security_protocol = "SASL_PLAINTEXT"\nkafka_sasl_username = "worker"',
            "SASL_PLAINTEXT needs kafka_sasl_username and kafka_sasl_password",
        ),
        (
            'kafka_security_protocol = "SSL"\nkafka_ssl_certificate_file = "/c"',
            "kafka_ssl_certificate_file and kafka_ssl_key_file: one needs the other",
        ),
        ('kafka_security_protocol = "TLS"', "kafka_security_protocol: Input should be 'PLAINTEXT'"),
        (
            'kafka_sasl_mechanism = "GSSAPI"',
            "kafka_sasl_mechanism: Input should be 'SCRAM-SHA-512'",
        ),
    ],
)
def test_half_a_login_is_refused(tmp_path: Path, lines: str, complaint: str) -> None:
    """A protocol that needs a login, or a certificate without its key, is refused before anything is tried."""
    assert complaint in refusal(tmp_path, ProcessorSettings, PROCESSOR + lines)


def test_fail_points_are_one_variable_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table in the file, a JSON object in the environment; without either there is none."""
    assert processor(tmp_path).fail_points == {}
    line = "fail_points = { block_reserved = 0.5 }\n"
    assert processor(tmp_path, line).fail_points == {WorkerFailPoint.BLOCK_RESERVED: 0.5}
    monkeypatch.setenv("FAIRPOST_FAIL_POINTS", '{"batch_emitted": 1}')
    assert processor(tmp_path, line).fail_points == {WorkerFailPoint.BATCH_EMITTED: 1}


@pytest.mark.parametrize(
    "text", ["block_reserved", "{", '{"nowhere": 1}', '{"block_reserved": 2}', '["block_reserved"]']
)
def test_fail_points_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """What is no JSON, no fail point or no probability is refused in one line that names the variable."""
    monkeypatch.setenv("FAIRPOST_FAIL_POINTS", text)
    refused = refusal(tmp_path, ProcessorSettings, PROCESSOR)
    assert refused.startswith("fail_points: ")
    assert refused.endswith("([processor] or FAIRPOST_FAIL_POINTS)")


def test_settings_do_not_change(tmp_path: Path) -> None:
    """What was read at the start holds to the end."""
    with pytest.raises(ValidationError):
        setattr(processor(tmp_path), "batch_size", 5)  # noqa: B010  mypy knows that it is frozen


# ------------------------------------------------------------------ what can be wrong


@pytest.mark.parametrize(
    ("kind", "text", "complaint"),
    [
        (
            ProcessorSettings,
            'processor.database = "dbname=x"',
            (
                "kafka_bootstrap_servers: is not set; put it into [processor] of the settings file"
                " or into FAIRPOST_KAFKA_BOOTSTRAP_SERVERS"
            ),
        ),
        (
            AgentSettings,
            AGENT.replace('bounce_domain = "b.test"\n', ""),
            (
                "bounce_domain: is not set; put it into [agent] of the settings file"
                " or into FAIRPOST_BOUNCE_DOMAIN"
            ),
        ),
        (
            AgentSettings,
            "",
            "; ".join(
                f"{name}: is not set; put it into [agent] of the settings file or into {variable}"
                for name, variable in (
                    ("instance", "FAIRPOST_INSTANCE"),
                    ("database", "FAIRPOST_DATABASE"),
                    ("bounce_domain", "FAIRPOST_BOUNCE_DOMAIN"),
                )
            ),
        ),
        (
            ProcessorSettings,
            PROCESSOR + "batch_sise = 5",
            "batch_sise: no such setting in [processor]",
        ),
        (AgentSettings, AGENT + "batch_size = 5", "batch_size: no such setting in [agent]"),
        (
            AgentSettings,
            AGENT.replace('"b.test"', '"-a.b"'),
            ("bounce_domain: the address has no valid domain ([agent] or FAIRPOST_BOUNCE_DOMAIN)"),
        ),
        (
            ProcessorSettings,
            PROCESSOR + "batch_size = 0",
            (
                "batch_size: Input should be greater than or equal to 1"
                " ([processor] or FAIRPOST_BATCH_SIZE)"
            ),
        ),
        (
            ProcessorSettings,
            PROCESSOR + 'batch_size = "many"',
            (
                "batch_size: Input should be a valid integer, unable to parse string as an integer"
                " ([processor] or FAIRPOST_BATCH_SIZE)"
            ),
        ),
        (
            ProcessorSettings,
            PROCESSOR + 'log_level = "LOUD"',
            (
                "log_level: Input should be 'DEBUG', 'INFO', 'WARNING' or 'ERROR'"
                " ([processor] or FAIRPOST_LOG_LEVEL)"
            ),
        ),
        (
            ProcessorSettings,
            PROCESSOR + 'log_timezone = "Mars/Olympus"',
            (
                "log_timezone: 'Mars/Olympus' is no time zone of the tz database"
                " ([processor] or FAIRPOST_LOG_TIMEZONE)"
            ),
        ),
        (
            ProcessorSettings,
            PROCESSOR + 'log_timezone = "../etc/passwd"',
            (
                "log_timezone: '../etc/passwd' is no time zone of the tz database"
                " ([processor] or FAIRPOST_LOG_TIMEZONE)"
            ),
        ),
        (
            ProcessorSettings,
            PROCESSOR + 'send_email = "maybe"',
            (
                "send_email: Input should be a valid boolean, unable to interpret input"
                " ([processor] or FAIRPOST_SEND_EMAIL)"
            ),
        ),
        (
            ProcessorSettings,
            f'[processor]\ndatabase = ["{SECRET}"]\nkafka_bootstrap_servers = "k"',
            "database: Input should be a valid string ([processor] or FAIRPOST_DATABASE)",
        ),
        (
            AgentSettings,
            AGENT + 'operators = ["Gmail"]',
            (
                "operators: String should match pattern '^[a-z][a-z0-9_]{0,62}$'"
                " ([agent] or FAIRPOST_OPERATORS)"
            ),
        ),
        (
            AgentSettings,
            AGENT + "lease_seconds = nan",
            (
                "lease_seconds: Input should be less than or equal to 600"
                " ([agent] or FAIRPOST_LEASE_SECONDS)"
            ),
        ),
        (
            AgentSettings,
            AGENT.replace("b.test", "localhost"),
            (
                r"bounce_domain: String should match pattern '^[a-z0-9-]+(\.[a-z0-9-]+)+$'"
                " ([agent] or FAIRPOST_BOUNCE_DOMAIN)"
            ),
        ),
        (ProcessorSettings, "processor = 5", "fairpost.toml: [processor] is no table"),
        (
            ProcessorSettings,
            f"[processor]\ndatabase = {SECRET}",
            "fairpost.toml: Invalid value (at line 2, column 12)",
        ),
        (
            ProcessorSettings,
            PROCESSOR + 'database = "x"\n',
            "fairpost.toml: Cannot overwrite a value (at line 4, column 15)",
        ),
    ],
)
def test_one_line_for_each_mistake(
    tmp_path: Path, kind: type[Settings], text: str, complaint: str
) -> None:
    """A mistake is one line: where the setting stands, its name, what is wrong; never its secret."""
    assert refusal(tmp_path, kind, text) == complaint


@pytest.mark.parametrize("variable", ["SEND_EMAIL", "FAIRPOST_SEND_EMAIL"])
def test_a_wrong_variable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """A value that stands in the environment is told under the name of a variable."""
    monkeypatch.setenv(variable, "maybe")
    assert refusal(tmp_path, AgentSettings, AGENT) == (
        "SEND_EMAIL: Input should be a valid boolean, unable to interpret input"
        " ([agent] or SEND_EMAIL)"
    )


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A directory and bytes that are no text are told in one line."""
    with pytest.raises(SettingsError, match=rf"^{tmp_path}: Is a directory$"):
        load_settings(ProcessorSettings, tmp_path)
    file = tmp_path / "latin.toml"
    file.write_bytes(b"\xff")
    with pytest.raises(SettingsError, match=rf"^{file}: 'utf-8' codec can't decode"):
        load_settings(ProcessorSettings, file)


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    """Neither side's settings print their connection string, nor Kafka's password."""
    login = f'kafka_sasl_username = "u"\nkafka_sasl_password = "{SECRET}"\n'
    kafka = processor(tmp_path, login)
    assert kafka.brokers.password.get_secret_value() == SECRET
    for shown in (processor(tmp_path), agent(tmp_path), kafka, kafka.brokers):
        assert SECRET not in f"{shown!r} {shown}"


def test_names_of_topics_and_groups(tmp_path: Path) -> None:
    """Installations that share a Kafka are kept apart by a prefix."""
    loaded = processor(tmp_path, 'topic_prefix = "eu."\n')
    assert loaded.topic("due-emails") == "eu.due-emails"
    assert loaded.group("worker") == "eu.fairpost-worker"
    assert loaded.topics == (
        "eu.campaigns",
        "eu.due-emails",
        "eu.send-emails",
        "eu.delivery-log",
        "eu.delivery-status",
        "eu.dead-letters",
    )


@pytest.mark.parametrize(
    "dsn", ["host=db password=s3 cret", "postgresql://u:s3%cret@db/x", "s3cret"]
)
def test_a_wrong_connection_string_is_not_quoted(tmp_path: Path, dsn: str) -> None:
    """Libpq's complaint quotes the string, password and all; ours says what it should be."""
    file = tmp_path / "fairpost.toml"
    file.write_text(f"[processor]\ndatabase = '{dsn}'\nkafka_bootstrap_servers = 'k:1'\n")
    with pytest.raises(SettingsError) as error:
        load_settings(ProcessorSettings, file)
    assert "is no connection string of libpq" in str(error.value)
    assert "s3" not in str(error.value)
