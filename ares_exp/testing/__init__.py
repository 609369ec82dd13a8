"""Conformance suites, which test whether your own agent, container or other part works with ares_exp.

A suite is a base class for pytest. Inherit from it in a test file and define its fixtures, or run it for a class with
`pytest --ares-exp-part=PACKAGE:NAME`. The suites for containers also need pytest-asyncio in `auto` mode.

Depends on the contracts and on the modules that run an episode. Used only by tests.

| suite | fixtures and attributes to define |
|---|---|
| `source_contract.SourceContract` | the fixture `source` |
| `environment_contract.EnvironmentContract` | `environment`, and `replies` |
| `policy_contract.PolicyContract` | `policy` |
| `collector_contract.CollectorContract` | `collector` |
| `tracker_contract.TrackerContract` | `tracker` |
| `agent_contract.AgentContract` | `factory`, and `replies` |
| `container_contract.ContainerContract` | `factory`, and `spec` |
| `changes_contract.ChangesContract` | `factory`, `spec` and `other_base`, for containers that support snapshots |
| `forwarded_port_contract.ForwardedPortContract` | `factory`, and `spec`, for containers that forward ports |

`python -m ares_exp.testing.demo_server` serves two scripted models for the tutorial.
"""

import sys

if "pytest" in sys.modules:  # a failed assertion of a suite then shows the compared values, as in a test module
    sys.modules["pytest"].register_assert_rewrite(
        *(f"{__name__}.{suite}_contract" for suite in ("source", "policy", "collector", "tracker", "agent")),
        *(f"{__name__}.{suite}_contract" for suite in ("container", "changes", "forwarded_port", "environment")),
    )
