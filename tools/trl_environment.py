"""Make the environment of `examples.grpo.with_trl` in .venv/trl, on top of the node's own.

It adds TRL with what its GRPOTrainer imports. It is a separate environment because transformers behaves
differently when accelerate is installed. A second run does nothing.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

WANTED = ("accelerate==1.15.0", "datasets==5.2.0")
ALONE = ("trl==1.16.0",)  # its own list asks for nothing more


def main() -> int:
    folder = Path(sys.prefix) / "trl"
    ready = folder / "-".join(("ready", *WANTED, *ALONE)).replace("==", "-")
    if ready.exists():
        return 0
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python, own = folder / "bin" / "python", sysconfig.get_path("purelib")
    where = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    (where / "beside.pth").write_text(f"import site; site.addsitedir({own!r})\n")
    install = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    subprocess.run([*install, *WANTED], check=True)
    subprocess.run([*install, "--no-deps", *ALONE], check=True)
    ready.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
