"""Whether the Hugging Face hub can be reached, within seconds."""

import socket
import threading
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

_SECONDS = 5.0


def find_connection_problem(endpoint: str, seconds: float = _SECONDS) -> str | None:
    """Return why there is no connection to a URL, or to the proxy that the environment names; None if there is."""
    url = urlsplit(endpoint)
    there = _find_proxy(url) or url
    host, port = there.hostname or "", there.port or (80 if there.scheme == "http" else 443)
    problems: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=seconds).close()
        except OSError as error:
            problems.append(error.strerror or str(error) or type(error).__name__)
        else:
            problems.append("")

    # In a thread: looking up the name may take longer than the timeout of a connection.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    problem = problems[0] if problems else f"no answer within {seconds:g} s"
    via = "" if there is url else f" through the proxy {host}"
    return f"no connection to {url.hostname}{via} ({problem})" if problem else None


def _find_proxy(url: SplitResult) -> SplitResult | None:
    """Return the proxy for a URL, from the environment as the hub's library does; None without one."""
    proxies = getproxies()
    found = proxies.get(url.scheme) or proxies.get("all")
    if not found or proxy_bypass(url.hostname or ""):
        return None
    return urlsplit(found if "://" in found else f"http://{found}")
