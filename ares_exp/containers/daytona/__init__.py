"""Sandboxes of the Daytona service, through its official SDK."""
