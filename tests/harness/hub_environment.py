"""The environment that KerasHub's models are built in: tfdml's own, and KerasHub besides it.

KerasHub asks for `tensorflow-text`, which brings a second TensorFlow. Its models need neither: text
is tokens here. So it is installed without what it asks for, and with what its import needs.
"""

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-hub"
REQUIREMENTS = ["keras-hub==0.32.*", "regex", "tokenizers"]


def python() -> Path:
    """Returns the environment's Python; makes the environment if it is not there, or not of now."""
    own = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / "made_of"
    made_of = hashlib.sha256("\0".join([*REQUIREMENTS, sys.version]).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == made_of:
        return own
    subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
    # What is installed beside the Python that calls is seen, behind what is installed here.
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    entry = ENVIRONMENT / "lib" / version / "site-packages" / "tfdml_environment.pth"
    entry.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    install = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*install, *REQUIREMENTS], check=True)
    stamp.write_text(made_of)
    return own
