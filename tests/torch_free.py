"""The command line in a process of its own, and which heavy packages it imports."""

import subprocess
import sys


def run_without_torch(arguments: list[str]) -> list[str]:
    """Run `saccade` with arguments and return its lines; fail if torch, timm, torchvision or onnx was imported."""
    code = (
        f"import sys; sys.argv = {['saccade', *arguments]!r}\n"
        "from saccade.cli import main\n"
        "code = main()\n"
        "print('imported', *{'torch', 'timm', 'torchvision', 'onnx'} & set(sys.modules))\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, imported = done.stdout.splitlines()
    assert imported == "imported"
    return lines
