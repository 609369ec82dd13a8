"""Exporting a run as a Harbor job: a folder that Harbor's viewer and scripts open."""
