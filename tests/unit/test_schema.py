"""What a database lacks of a release, and what it has of a newer one."""

from contract.schema import Fit, SchemaFile, compare, schema_files

TABLES = SchemaFile("0001_schema", "migration", "CREATE TABLE a ()")
OLD = SchemaFile("processor/plan.sql", "functions", "SELECT 1")
NEW = SchemaFile("processor/plan.sql", "functions", "SELECT 2")


def applied(*files: SchemaFile) -> list[tuple[str, str]]:
    """What the database remembers, in that order."""
    return [(file.name, file.digest) for file in files]


def test_the_release_itself_fits() -> None:
    """What was applied as it is now is neither lacking nor surpassed."""
    assert compare([TABLES, OLD], applied(TABLES, OLD)) == Fit([], [])


def test_an_empty_database_lacks_everything() -> None:
    """In the order in which it is applied."""
    assert compare([TABLES, OLD], []) == Fit(["0001_schema", "processor/plan.sql"], [])


def test_functions_of_an_older_release() -> None:
    """Functions that were never applied as they are now are lacking."""
    assert compare([TABLES, NEW], applied(TABLES, OLD)) == Fit(["processor/plan.sql"], [])


def test_functions_of_a_newer_release() -> None:
    """Functions that were applied, and replaced since, are surpassed."""
    assert compare([TABLES, OLD], applied(TABLES, OLD, NEW)) == Fit([], ["processor/plan.sql"])


def test_functions_that_came_back() -> None:
    """A release that was gone back to is the newest again."""
    rows = applied(TABLES, NEW, OLD)
    assert compare([TABLES, OLD], rows) == Fit([], [])
    assert compare([TABLES, NEW], rows) == Fit([], ["processor/plan.sql"])


def test_a_migration_counts_by_its_name() -> None:
    """A migration is applied once, whatever became of its text."""
    edited = SchemaFile("0001_schema", "migration", "-- edited")
    assert compare([edited], applied(TABLES)) == Fit([], [])


def test_what_a_newer_release_brought() -> None:
    """Files that this release does not know are named; those of the other side are none of its business."""
    rows = applied(
        TABLES,
        OLD,
        SchemaFile("0002_more", "migration", ""),
        SchemaFile("processor/more.sql", "functions", ""),
        SchemaFile("smtp_agent/claims.sql", "functions", ""),
    )
    assert compare([TABLES, OLD], rows) == Fit([], ["0002_more", "processor/more.sql"])


def test_each_side_wants_its_own() -> None:
    """A side wants all migrations and the functions of its own package."""
    names = {file.name for file in schema_files("smtp_agent")}
    assert {"0001_schema", "smtp_agent/claims.sql"} <= names
    assert not {name for name in names if name.startswith("processor/")}
