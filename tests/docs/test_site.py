"""The documentation site: what is in it, and that it needs no network."""

import re
import subprocess
from html import unescape

import pytest

import tfdml
from tests.docs.pages import LINKED, ROOT, name
from tests.docs.test_pages import TFDML
from tools.site import curves, docstrings, gallery, offline, recipes, reference, staging
from tools.site.contents import CONTENTS, ELSEWHERE
from tools.site.paths import HTML

IN_FOLDERS = ("benchmarks/", "troubleshooting/")


def test_every_page_is_in_the_sidebar():
    found = [page for pages in CONTENTS.values() for page in pages]
    assert len(found) == len(set(found))
    staged = {file.removesuffix(".md") for file in staging.pages().values()}
    assert {p for p in staged if not p.startswith(IN_FOLDERS)} - {"index"} <= set(found)
    made = {"gallery/index", "api/index", "commands/index", "troubleshooting/index"}
    assert set(found) <= staged | made


def test_every_page_of_the_repository_is_staged():
    assert {page for page in LINKED if page not in staging.pages()} == set()


def test_no_page_is_made_of_two_files():
    """Else links to one of them lead to the other."""
    files = {ROOT / path: name for path, name in ELSEWHERE.items() if path.endswith(".md")}
    names = files | staging.pages()
    assert len(set(names.values())) == len(names)


def test_every_recipe_is_in_the_gallery():
    shown = {r.name for r in recipes.RECIPES} | set(recipes.HELPERS)
    assert shown == {file.stem for file in (ROOT / "recipes").glob("*.py")}
    for recipe in recipes.RECIPES:
        assert any(f"recipes/{recipe.name}.py" in command for command in recipe.commands)


def test_recipes_run_as_their_headers_say():
    """On two ranks, by the launcher of the recipe's own header."""
    for recipe in recipes.RECIPES:
        header = (ROOT / "recipes" / f"{recipe.name}.py").read_text(encoding="utf-8")
        for command in recipe.commands:
            program = " ".join(command.split()[:2])
            if program in ("horovodrun -np", "tfdml launch"):
                assert program in header, recipe.name


@pytest.mark.parametrize(
    ("html", "found"),
    [
        ('<img src="https://a.org/x.png">', ["https://a.org/x.png"]),
        ('<script src="//cdn.org/x.js"></script>', ["//cdn.org/x.js"]),
        ('<link rel="stylesheet" href="http://a.org/x.css">', ["http://a.org/x.css"]),
        ("<style>@import 'https://a.org/x.css';</style>", ["https://a.org/x.css"]),
        ('<p style="background: url(https://a.org/b.png)">', ["https://a.org/b.png"]),
        ('<a href="https://a.org">read</a><img src="x.png">', []),
    ],
)
def test_what_loads_from_the_network_is_found(tmp_path, html, found):
    (tmp_path / "page.html").write_text(html)
    (tmp_path / "style.css").write_text("p { background: url(data:x) }")
    assert offline.remote_resources(tmp_path) == [f"page.html: {address}" for address in found]


def test_a_remote_font_of_a_style_sheet_is_found(tmp_path):
    (tmp_path / "style.css").write_text("@font-face { src: url('https://a.org/font.woff2') }")
    assert offline.remote_resources(tmp_path) == ["style.css: https://a.org/font.woff2"]


def test_a_failing_recipe_fails_the_build():
    wrong = recipes.Recipe("table", "A table", ("echo begins", "echo why; exit 3"))
    with pytest.raises(gallery.RecipeFailed, match=r"table: exit code 3: echo why(?s:.*)\nwhy"):
        gallery.run(wrong)


def test_a_recipe_runs_in_its_environment(tmp_path):
    command = tmp_path / "python"
    command.write_text("#!/bin/sh\necho of the environment\n")
    command.chmod(0o755)
    other = recipes.Recipe("table", "A table", ("python",), python=lambda: command)
    assert gallery.run(other) == "$ python\nof the environment\n"


def test_an_output_is_kept_until_something_changes(monkeypatch):
    first, *_ = recipes.RECIPES
    assert gallery.digest(first) == gallery.digest(first)
    assert gallery.digest(first) != gallery.digest(first._replace(commands=("true",)))
    monkeypatch.setattr(gallery.metadata, "version", lambda name: "0")
    assert gallery.digest(first) != gallery.digest(recipes.RECIPES[1])


def test_curves_of_the_ways_that_programs_print():
    output = (
        "[0] Epoch 1/2, step 3/9, 5 s left: 1 s - loss: 9.0\n"
        "[0] Epoch 1/2: 1.0 s, 130 ms/step - accuracy: 0.25 - val_loss: 2e+00\n"
        "[0] Epoch 2/2: 0.1 s, 17 ms/step - accuracy: 0.5 - val_loss: 1.5\n"
    )
    assert curves.read(output) == {"accuracy": [0.25, 0.5], "val_loss": [2.0, 1.5]}
    assert curves.read("epoch 1: loss 2.5\nepoch 2: loss 2.25\n") == {"loss": [2.5, 2.25]}
    rounds = "before: accuracy 0.1\nround 1: accuracy 0.5\nround 2: accuracy 0.75\n"
    assert curves.read(rounds) == {"accuracy": [0.5, 0.75]}
    assert curves.read("written: lines.jsonl, 9 lines") == {}


def test_markdown_code_of_docstrings():
    rst_lines = docstrings.to_rst(
        ["Takes `x`", "", "```python", "f(`x`)", "```", "and ``y``, `a", "b`."]
    )
    assert rst_lines[:2] == ["Takes ``x``", ""]
    assert [line for line in rst_lines if "code-block" in line] == [".. code-block:: python"]
    assert "and ``y``, ``a" in rst_lines


def test_members_are_those_of_tfdml():
    members = reference._members(tfdml.HorovodStrategy)
    assert {"rank", "size", "is_chief"} <= set(members)
    assert "scope" not in members  # TensorFlow's.


@pytest.mark.slow
def test_the_site_builds():
    """Warnings are errors, and recipes run: minutes, unless their outputs are kept."""
    done = subprocess.run(
        [ROOT / "tools" / "docs"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert offline.remote_resources(HTML) == []
    for pages in CONTENTS.values():
        for page in pages:
            assert (HTML / f"{page}.html").exists(), page
    for command in TFDML.commands:
        assert f"tfdml {command}" in (HTML / "commands" / f"{command}.html").read_text()
    for module in ("tfdml", *(f"tfdml.{m}" for m in reference.MODULES)):
        html = (HTML / "api" / f"{module}.html").read_text()
        names = __import__(module, fromlist=["x"]).__all__
        for public in set(names) - {"strategies", *reference.MODULES} - {"__version__"}:
            assert f'id="{module}.{public}"' in html, f"{module}.{public}"
    for recipe in recipes.RECIPES:
        text = unescape(
            re.sub("<[^>]+>", "", (HTML / "gallery" / f"{recipe.name}.html").read_text())
        )
        assert all(f"$ {command}" in text for command in recipe.commands), name(ROOT / "recipes")
