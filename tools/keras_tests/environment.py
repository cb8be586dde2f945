"""Python environment of Keras's tests: tfdml's own plus their additional packages."""

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-keras"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
ALL_REQUIREMENTS = Path(__file__).with_name("requirements_all.txt")


def python(everything: bool = False) -> Path:
    """Returns the environment's Python; creates the environment if it is missing or outdated.

    It sees the calling Python's packages; its own packages take precedence.

    Args:
        everything: Whether to install packages that only some tests need: gigabytes.
    """
    own = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / "made_of"
    files = (REQUIREMENTS, ALL_REQUIREMENTS)
    parts = [
        *(file.read_bytes() for file in files),
        (ROOT / "setup.py").read_bytes(),
        sys.version.encode(),
    ]
    made_of = hashlib.sha256(b"\0".join(parts)).hexdigest()
    fits = {f"{made_of} all"} if everything else {made_of, f"{made_of} all"}
    if stamp.exists() and stamp.read_text() in fits:
        return own
    subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
    packages = sysconfig.get_path("purelib")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site_packages = ENVIRONMENT / "lib" / version / "site-packages"
    # `addsitedir`, because the folder's own .pth files say where tfdml is.
    entry = f"import site; site.addsitedir({packages!r})\n"
    (site_packages / "tfdml_environment.pth").write_text(entry)
    install = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "-r", REQUIREMENTS], check=True)
    if everything:
        subprocess.run([*install, "-r", ALL_REQUIREMENTS], check=True)
        # It crashes in a process that has TensorFlow loaded, and torch works without it.
        subprocess.run([own, "-m", "pip", "uninstall", "--yes", "--quiet", "triton"], check=True)
    stamp.write_text(f"{made_of} all" if everything else made_of)
    return own
