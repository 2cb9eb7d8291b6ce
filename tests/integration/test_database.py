"""The pool of connections, against a server that ends them."""

from contract.database import Connection, Pool

_END_OTHERS = """
SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = 'test'"""


async def test_a_connection_that_the_server_ended_is_given_to_nobody(
    worker: Pool, owner: Connection
) -> None:
    """Whoever asks for a connection after the server ended those that were idle gets one that works, at the first try."""
    async with worker.connection() as first, worker.connection() as second:
        pids = {first.info.backend_pid, second.info.backend_pid}
    await owner.execute(_END_OTHERS)
    async with worker.connection() as first, worker.connection() as second:
        for connection in (first, second):
            assert await (await connection.execute("SELECT 1")).fetchone() == (1,)
            assert connection.info.backend_pid not in pids
