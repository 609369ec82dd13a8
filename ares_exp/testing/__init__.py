"""Conformance suites for third-party parts: base classes for tests, and the function `check_agent`.

Imports the contracts and the modules that run an episode; only tests import it. The suites need pytest, and the
container suite also needs pytest-asyncio in `auto` mode. `pytest --ares-exp-part=PACKAGE:NAME` runs the suite for a
class.

| suite | fixtures and attributes to define |
|---|---|
| `source_contract.SourceContract` | the fixture `source` |
| `environment_contract.EnvironmentContract` | `environment`, and `replies` |
| `policy_contract.PolicyContract` | `policy` |
| `collector_contract.CollectorContract` | `collector` |
| `tracker_contract.TrackerContract` | `tracker` |
| `agent_contract.AgentContract` | `factory`, and `replies` |
| `container_contract.ContainerContract` | `factory`, and `spec` |
| `changes_contract.ChangesContract` | the same, for containers that can be captured |
| `forwarded_port_contract.ForwardedPortContract` | the same, for containers that support forwarded ports |

`python -m ares_exp.testing.demo_server` serves two scripted models for the tutorial.
"""

import sys

if "pytest" in sys.modules:  # a failed assertion of a suite then shows the compared values, as in a test module
    sys.modules["pytest"].register_assert_rewrite(
        *(f"{__name__}.{suite}_contract" for suite in ("source", "policy", "collector", "tracker", "agent")),
        *(f"{__name__}.{suite}_contract" for suite in ("container", "changes", "forwarded_port", "environment")),
    )
