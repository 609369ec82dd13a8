"""Commands of `ares-exp`, one file each."""
