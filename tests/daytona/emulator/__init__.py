"""A Daytona service on a loopback port, for tests: its sandboxes are local boxes or Docker containers of ours.

Read `emulator` first. `python -m tests.daytona.emulator` serves one until Ctrl-C.
"""

from tests.daytona.emulator.emulator import Emulator
from tests.daytona.emulator.faults import Fault
from tests.daytona.emulator.wire import Request

__all__ = ["Emulator", "Fault", "Request"]
