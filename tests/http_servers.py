"""HTTP servers of tests."""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class PatientServer(ThreadingHTTPServer):
    """A client that hangs up is no error. Printed by a thread, its traceback is parsed there, and Python 3.11
    may fail in a main thread that parses at the same moment (one counter of depth for all threads)."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)
