"""Tasks (each with an instruction, a container and a verifier), with their formats, sources and verification.

Depends on `containers` and `trajectories`. Used by `agents`, `environments`, `runs` and `trackers`.
"""
