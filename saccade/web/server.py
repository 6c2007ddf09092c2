"""From a service to a listening page, with nothing of the host open but what the page made itself."""

import os
from pathlib import Path
from typing import NamedTuple

from saccade._extras import require
from saccade.web.page import build_page
from saccade.web.service import Service
from saccade.web.style import CSS, theme

WAITING = 64  # requests that may wait; the next are told that the queue is full


class Running(NamedTuple):
    """A page that listens."""

    url: str
    page: object
    service: Service

    def close(self) -> None:
        self.page.close(verbose=False)  # type: ignore[attr-defined]
        self.service.close()


def start(
    service: Service, host: str = "127.0.0.1", port: int | None = None, waiting: int = WAITING, browser: bool = False
) -> Running:
    """Listen in the background; gives the address. Files: only those that were uploaded here or made here."""
    require("gradio", "web")
    os.environ["GRADIO_TEMP_DIR"] = str(service.folder / "uploads")  # Gradio's own, gone with the service
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    page = build_page(service)
    page.queue(max_size=waiting, default_concurrency_limit=2, api_open=False)
    _, url, _ = page.launch(
        server_name=host,
        server_port=port,
        share=False,
        inbrowser=browser,
        quiet=True,
        prevent_thread_lock=True,
        show_error=False,
        allowed_paths=[],
        blocked_paths=[str(Path(__file__).parents[1])],
        max_file_size=int(service.limits.megabytes * 1_000_000),
        max_threads=16,
        state_session_capacity=200,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        run_history=False,
        footer_links=["api"],
        theme=theme(),
        css=CSS,
    )
    return Running(url, page, service)
