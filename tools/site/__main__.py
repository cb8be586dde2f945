"""Builds the documentation site into `build/docs/html`; `tools/docs` calls this.

`python -m tools.site --pages` leaves the recipes out.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from tools.site import commands, gallery, offline, reference, staging
from tools.site.paths import BUILD, HTML, SOURCE


def main(
    pages: Annotated[bool, typer.Option("--pages", help="Run no recipe.")] = False,
) -> None:
    """Build the site; warnings are errors."""
    for folder in (SOURCE, HTML):
        shutil.rmtree(folder, ignore_errors=True)
    reference.write_pages()
    commands.write_pages()
    gallery.write_pages(run_recipes=not pages)
    staging.stage()
    sphinx = ["-m", "sphinx", "-b", "html", "-W", "--keep-going", "-n", "-q", "-E", "-j", "2"]
    folders = ["-c", str(Path(__file__).parent), "-d", str(BUILD / "doctrees")]
    done = subprocess.run([sys.executable, *sphinx, *folders, str(SOURCE), str(HTML)], check=False)
    if done.returncode:
        sys.exit(done.returncode)
    remote = offline.remote_resources(HTML)
    if remote:
        sys.exit("site: pages load these from the network:\n" + "\n".join(remote))
    typer.echo(f"site: built {HTML}/index.html")


if __name__ == "__main__":
    typer.run(main)
