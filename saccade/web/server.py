"""Start the page and its API; the only files they serve are uploads and their own outputs."""

import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from saccade.reports import STYLE
from saccade.web.api import describe_health, make_api
from saccade.web.page import build_page
from saccade.web.service import Service

QUEUE_SIZE = 64  # further requests are rejected
SYSTEM = ["system-ui", "-apple-system", "Segoe UI", "sans-serif"]  # nothing is fetched from other hosts
MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "monospace"]


class Server(NamedTuple):
    """A running page."""

    url: str
    page: Any  # gr.Blocks
    service: Service

    def close(self) -> None:
        self.page.close(verbose=False)
        self.service.close()


def check_address(host: str, port: int | None = None) -> None:
    """Raise if the host is no address of this machine or the port is in use: uvicorn would print it and retry."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a host name"
        place = f"{host}, port {port}" if port else host
        raise ValueError(
            f"expected a free address of this machine, got {place} ({reason}). Change --host or --port."
        ) from error


def start(
    service: Service,
    host: str = "127.0.0.1",
    port: int | None = None,
    queue_size: int = QUEUE_SIZE,
    browser: bool = False,
) -> Server:
    """Start the page in the background and return it with its address."""
    os.environ["GRADIO_TEMP_DIR"] = str(service.folder / "uploads")  # deleted by `Service.close`
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    page = build_page(service)
    page.queue(max_size=queue_size, default_concurrency_limit=2, api_open=False)
    app, url, _ = page.launch(
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
        footer_links=[],
        theme=theme(),
        head=f"<style>{STYLE}</style>",  # Gradio rewrites the selectors of `css`
    )
    health = Route("/health", lambda request: JSONResponse(describe_health(service).model_dump()))
    app.router.routes[:0] = [health, Mount("/api", make_api(service, queue_size))]  # before Gradio's own
    return Server(url, page, service)


def theme() -> Any:
    """Return Gradio's base theme in blue (the colour of the first token), with system fonts."""
    blue = gr.themes.Color(
        "#eaf4fb", "#d2e7f5", "#a8d1ec", "#79b8e0", "#4a9ed3", "#0072b2", "#00659e", "#005685", "#00466d", "#003757",
        "#002740", name="saccade",
    )  # fmt: skip
    return gr.themes.Base(
        primary_hue=blue, secondary_hue=blue, neutral_hue="slate", font=SYSTEM, font_mono=MONO, radius_size="md"
    ).set(block_label_text_size="12px", block_shadow="none")
