"""Export of a run as a Harbor job: a folder that Harbor's viewer and scripts open.

Imports resume, trajectories and tasks; imported by the command `export`.
"""
