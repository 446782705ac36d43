"""A real JupyterLab on 127.0.0.1 and a real Chromium that open notebooks and use them.

Without Chromium these tests are skipped; IGLENS_REQUIRE_BROWSER=1 turns that into a failure.
"""

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import nbformat
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]  # fmt: skip
PATIENCE = 120  # seconds, for every wait


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    if CHROMIUM is None:
        (pytest.fail if os.environ.get("IGLENS_REQUIRE_BROWSER") == "1" else pytest.skip)("no Chromium is installed")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE * 1000)
    with sync_playwright() as playwright:
        profile = str(tmp_path_factory.mktemp("profile"))
        window = {"width": 1280, "height": 720}
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, headless=True, args=FLAGS, viewport=window
        )
        context.set_default_timeout(PATIENCE * 1000)
        yield context
        context.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """A JupyterLab with a home, settings and token of its own: (address, token, its folder)."""
    home = tmp_path_factory.mktemp("lab")
    root = home / "root"
    root.mkdir()
    settings = {
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
        "notebook-extension/tracker": {"windowingMode": "none"},  # else text outside the window reads as empty
        "docmanager-extension/plugin": {"autosave": False},
    }
    for plugin, values in settings.items():
        file = home / "config/lab/user-settings/@jupyterlab" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values), encoding="utf-8")
    token, port = secrets.token_hex(16), _free_port()
    options = [f"--ServerApp.port={port}", f"--ServerApp.root_dir={root}", f"--IdentityProvider.token={token}",
               "--ServerApp.ip=127.0.0.1", "--ServerApp.port_retries=0", "--LabApp.extension_manager=readonly",
               "--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]  # fmt: skip
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser", *options]
    address = f"http://127.0.0.1:{port}"
    with _serving(command, home, f"{address}/api/status?token={token}"):
        yield address, token, root


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def _serving(command: list[str], home: Path, answers: str):
    """A server with a home of its own that runs until the end of the block; it is up when the address answers."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    environment |= {"JUPYTER_CONFIG_DIR": str(home / "config"), "JUPYTER_DATA_DIR": str(home / "data"),
                    "JUPYTER_RUNTIME_DIR": str(home / "run"), "IPYTHONDIR": str(home / "ipython")}  # fmt: skip
    log = home / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                urllib.request.urlopen(answers, timeout=PATIENCE).read()  # noqa: S310
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > end:
                    pytest.fail(f"{command[2]} did not start:\n" + log.read_text(encoding="utf-8")[-3000:])
                time.sleep(0.2)
        yield
    finally:
        server.send_signal(signal.SIGTERM)  # it then shuts its kernels down
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


@pytest.fixture
def open_voila(chromium, tmp_path):
    """open_voila(path): a page of a Voilà that serves the notebook, as people see it who shall not see code."""
    with ExitStack() as servers:

        def opener(path: Path):
            address = f"http://127.0.0.1:{_free_port()}"
            options = ["--no-browser", f"--port={address.rpartition(':')[2]}", "--Voila.ip=127.0.0.1"]
            command = [sys.executable, "-m", "voila", str(path), *options, "--show_tracebacks=True"]
            servers.enter_context(_serving(command, tmp_path, f"{address}/voila/static/favicon.ico"))
            page = servers.enter_context(closing(chromium.new_page()))
            _watch(page, address)
            page.route(lambda url: not url.startswith(address), lambda route: route.abort())  # as without a network
            page.goto(address)
            return page

        yield opener


def _watch(page, address: str) -> None:
    """Keep what the page asks for that is not the server's, as page.outside."""
    page.outside = []
    ours = (address, address.replace("http", "ws"), "data:", "blob:")
    page.on("request", lambda asked: None if asked.url.startswith(ours) else page.outside.append(asked.url))


@pytest.fixture
def open_notebook(lab, chromium):
    """open_notebook(path, last): a page with a copy without outputs, so that all that is seen is of this run.

    last: the id of the last cell that is kept.
    """
    address, token, root = lab
    pages = []

    def opener(path: Path, last: str | None = None):
        notebook = nbformat.read(path, as_version=4)
        ids = [cell.id for cell in notebook.cells]
        del notebook.cells[len(ids) if last is None else ids.index(last) + 1 :]
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        notebook.metadata.pop("widgets", None)
        name = f"{path.stem}-{secrets.token_hex(4)}.ipynb"
        nbformat.write(notebook, root / name)
        page = chromium.new_page()
        pages.append(page)
        _watch(page, address)
        page.goto(f"{address}/lab/workspaces/test{len(pages)}/tree/{name}?token={token}&reset")
        return page

    yield opener
    for page in pages:
        page.close()


@pytest.fixture(scope="session")
def idle():
    from playwright.sync_api import expect

    def wait(page):
        expect(page.locator("#jp-main-statusbar")).to_contain_text("| Idle")

    return wait


@pytest.fixture(scope="session")
def run_all(idle):
    """run_all(page): run every cell; fails with the outputs where one raises."""
    from playwright.sync_api import expect

    def run(page):
        idle(page)  # earlier, the command would be lost in silence
        done = page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
        assert done, page.locator(".jp-OutputArea-output").all_inner_texts()
        prompts = page.locator(".jp-CodeCell .jp-InputPrompt")
        expect(prompts.filter(has_text=re.compile(r"\[[ *]\]:"))).to_have_count(0)

    return run
