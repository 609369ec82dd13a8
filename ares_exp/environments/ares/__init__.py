"""`env=ares`: environments of the `martian-ares` package, which is imported only when they are asked for."""
