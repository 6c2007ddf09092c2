"""Start the page; the only files it serves are uploads and its own outputs."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from saccade._extras import require
from saccade.web.page import build_page
from saccade.web.service import Service
from saccade.web.style import CSS, theme

QUEUE_SIZE = 64  # further requests are rejected


class Server(NamedTuple):
    """A running page."""

    url: str
    page: Any  # gr.Blocks
    service: Service

    def close(self) -> None:
        self.page.close(verbose=False)
        self.service.close()


def start(
    service: Service,
    host: str = "127.0.0.1",
    port: int | None = None,
    queue_size: int = QUEUE_SIZE,
    browser: bool = False,
) -> Server:
    """Start the page in the background and return it with its address."""
    require("gradio", "web")
    os.environ["GRADIO_TEMP_DIR"] = str(service.folder / "uploads")  # deleted by `Service.close`
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    page = build_page(service)
    page.queue(max_size=queue_size, default_concurrency_limit=2, api_open=False)
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
    return Server(url, page, service)
