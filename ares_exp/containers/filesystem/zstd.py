"""The module `zstd` of the standard library (Python 3.14 or newer), or its backport for older versions."""

import sys

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd
