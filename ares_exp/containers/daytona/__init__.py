"""`container=daytona`: containers that are sandboxes of the Daytona service, through its official SDK."""

from ares_exp.containers.daytona.factory import DaytonaContainerFactory as DaytonaContainerFactory
