"""Real services on loopback, as child processes, for the demo, the tests and the benchmarks."""

from testbed.fleet import Testbed

__all__ = ["Testbed"]
