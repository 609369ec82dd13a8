"""`ares-exp report RUN|SWEEP [RUN2]`: one HTML file that shows all of it, and needs no network.

Imports pages, reporting and sweeps; imported by view and by its command.
"""
