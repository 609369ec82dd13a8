"""Containers: the boxes that code agents work in."""
