"""Checks that README and the pages are correct: links resolve, and commands and code exist."""

import json
import re
from collections.abc import Sequence

import pytest
import typer

from tests.docs import pages
from tests.docs.pages import INDEX, LINKED, PAGES, README, ROOT, name
from tfdml.cli.main import app
from tools.bench.compression.model import formula

TFDML = typer.main.get_command(app)
ALL_PAGES = pytest.mark.parametrize("page", PAGES, ids=name)


def test_readme_is_short():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 100] == []


@ALL_PAGES
def test_links_lead_somewhere(page):
    for link in pages.links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)}: {link}"
        assert ROOT in target.parents, f"{name(page)}: {link} leads out of the repository"
        assert not anchor or anchor in pages.anchors(target), f"{name(page)}: {link}"


def test_each_page_is_found_from_the_index():
    found, left = set(), [INDEX]
    while left:
        page = left.pop()
        found.add(page)
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in pages.links(page)}
        left += [t for t in targets if t in LINKED and t not in found]
    assert set(LINKED) <= found
    assert INDEX in {(ROOT / link.partition("#")[0]).resolve() for link in pages.links(README)}


def test_pages_that_python_files_name_exist():
    named = re.compile(r"\b(?:docs|recipes|tools/benchmarks)/\w+\.md\b")
    folders = ("tfdml", "tools", "recipes", "tests")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*.py")]
    found = {m: name(f) for f in files for m in named.findall(f.read_text(encoding="utf-8"))}
    assert len(found) >= 3
    assert {page: file for page, file in found.items() if not (ROOT / page).exists()} == {}


@ALL_PAGES
def test_commands_exist(page):
    for words in pages.tfdml_commands(page):
        assert mistake(words) is None, f"{name(page)}: tfdml {' '.join(words)}: {mistake(words)}"


def test_pages_contain_commands():
    assert sum(1 for page in PAGES for _ in pages.tfdml_commands(page)) > 30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch", "--workers", "2", "train.py", "--anything"], None),
        (["launch", "--workerz", "2", "train.py"], "no option --workerz"),
        (["lunch", "train.py"], "no command lunch"),
        (["records", "convert", "in", "-o", "out", "--shufle", "1"], "no option --shufle"),
        (["records", "repair", "out"], "no command repair"),
    ],
)
def test_wrong_commands_are_detected(words, message):
    assert mistake(words) == message


def mistake(words: Sequence[str]) -> str | None:
    """Returns the part of a command that the command line does not know; None if it knows all."""
    command, words = TFDML, list(words)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        word = words.pop(0)
        if word not in command.commands:
            return f"no command {word}"
        command = command.commands[word]
    options = {o: p for p in command.params for o in (*p.opts, *p.secondary_opts)}
    options |= {o: None for o in ("-h", "--help")}
    while words:
        word = words.pop(0).partition("=")[0]
        if not word.startswith("-") or word == "--":
            if not command.context_settings.get("allow_interspersed_args", True):
                break  # The script's own arguments follow.
        elif word not in options:
            return f"no option {word}"
        elif options[word] is not None and not options[word].is_flag:
            words = words[1:]
    return None


@ALL_PAGES
def test_python_compiles(page):
    for block in pages.blocks(page):
        if block.language == "python":
            compile(block.text, name(page), "exec")


def test_the_exchange_model_is_computed_and_the_measurements_are_quoted():
    """The table of the page on exchanges: 2(N-1)(α + S/(N·B)), beside compression.json."""
    measured = json.loads((ROOT / "tools/benchmarks/compression.json").read_text())
    codecs = {"`Float16`": "fp16", "8 bit": "int8", "4 bit": "int4", "1 bit": "onebit"}
    codecs |= {"none": "none", "PowerSGD, rank 4": "powersgd 4"}
    latency, rates = 1.2e-3, {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10}
    page = (ROOT / "docs/gradient_exchange.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([24]) \| (.+?) \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) == 12
    for ranks, codec, cells in rows:
        size, key, quoted = int(ranks), codecs[codec], [c.strip() for c in cells.split(" | ")]
        for number, (rate, bits) in enumerate(rates.items()):
            rounds = 2 if key == "powersgd 4" else 1
            model = rounds * 2 * (size - 1) * latency + formula(key, size) / (0.956 * bits / 8)
            assert quoted[2 * number] == f"{1e3 * model:,.0f}"
            of = measured[f"{rate} x {size} x mlp"]["results"]
            if rate == "100mbit":
                step = of.get("raw Horovod" if key == "none" else key, {}).get("median")
                seconds = step and step - of["local"]["median"]
            else:
                seconds = of[key]["exchange" if key == "none" else "wire"]
            assert quoted[2 * number + 1] == (f"{1e3 * seconds:,.0f}" if seconds else "")


BENCHMARKS = sorted((ROOT / "tools" / "benchmarks").glob("*.md"))
SKELETON = ("Question", "Hardware", "Versions", "Command", "Meaning", "tfdml is slower")


@pytest.mark.parametrize("page", BENCHMARKS, ids=name)
def test_a_benchmark_answers_in_one_order(page):
    text = page.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \|$", text, re.MULTILINE)[: len(SKELETON)]
    assert tuple(heading for heading, _ in rows) == SKELETON
    assert all(len(answer) > 10 for _, answer in rows)


@pytest.mark.parametrize("page", BENCHMARKS, ids=name)
def test_figures_of_a_summary_are_in_its_page(page):
    """The summary invents nothing: each of its numbers is in the page's tables or text."""
    text = page.read_text(encoding="utf-8")
    first = text.index("| **Meaning**")
    after = text.index("\n\n", first)
    summary, body = text[first:after], text[after:].replace(",", "")
    for number in re.findall(r"\d[\d,.]*\d|\d+", summary):
        plain = number.replace(",", "")
        # 73 may stand for 72.7.
        assert re.search(rf"(?<![\d.]){re.escape(plain)}|{_rounded(plain)}", body), number


def _rounded(number: str) -> str:
    """Returns a pattern of the numbers with one more digit that round to this one."""
    digits = len(number.partition(".")[2])
    near = [float(number) + shift * 10 ** -(digits + 1) for shift in range(-5, 6)]
    return "|".join(rf"(?<![\d.]){re.escape(f'{value:.{digits + 1}f}')}" for value in near)
