"""Each block of the pages runs, or says why it does not: `<!-- not run: REASON -->` above it."""

import re
import shlex

import pytest
import yaml
from packaging.requirements import Requirement

from tests.docs import pages, snippets
from tests.docs.pages import PAGES, ROOT, name
from tests.docs.test_pages import mistake

ALL_PAGES = pytest.mark.parametrize("page", PAGES, ids=name)
# The scripts that readers are asked to write, or that are theirs.
SCRIPTS = {"train.py"}


def python_blocks(page: str) -> list[str]:
    found = pages.blocks(ROOT / page)
    # test_readme_runs.py runs README's program by its commands.
    return [
        block.text
        for block in found
        if block.language == "python"
        and not block.not_run
        and not (page == "README.md" and "FaultTolerantCheckpoint" in block.text)
    ]


def test_every_page_with_python_runs():
    with_python = {name(page) for page in PAGES if python_blocks(name(page))}
    assert with_python == set(snippets.PAGES)


def test_each_page_is_made_smaller_where_it_says_so():
    for page, settings in snippets.PAGES.items():
        text = "\n".join(python_blocks(page))
        for before in [b for b, _ in settings.smaller] + [b for b, _ in settings.around]:
            assert before in text, f"{page}: {before}"


@pytest.mark.parametrize("page", [p for p, s in snippets.PAGES.items() if s.kind == "horovod"])
def test_python_on_horovod(page, ranks, tmp_path):
    size = snippets.PAGES[page].size
    ran = ranks(size, "horovod").run(snippets.run, page, python_blocks(page), str(tmp_path))
    assert ran == [len(python_blocks(page))] * size


@pytest.mark.parametrize("page", [p for p, s in snippets.PAGES.items() if s.kind == "multi_worker"])
def test_python_on_workers(page, ranks, tmp_path):
    ran = ranks(2, "multi_worker").run(snippets.run, page, python_blocks(page), str(tmp_path))
    assert ran == [len(python_blocks(page))] * 2


def test_python_on_parameter_servers(cluster, tmp_path):
    page = "docs/parameter_servers.md"
    blocks = python_blocks(page)
    assert cluster.run(snippets.run, page, blocks, str(tmp_path)) == len(blocks)


def test_a_block_that_is_wrong_is_seen(ranks, tmp_path):
    arguments = ("docs/troubleshooting/speed.md", ["tfdml.callback.StepMonitor()"], str(tmp_path))
    with pytest.raises(AssertionError, match="has no attribute 'callback'"):
        ranks(2, "horovod").run(snippets.run, *arguments)


@ALL_PAGES
def test_shell_commands_are_known(page):
    for block in pages.blocks(page):
        for line in [] if block.not_run else pages.command_lines(block):
            if not block.text.startswith("tfdml: "):  # What a failing job says.
                assert wrong(line) is None, f"{name(page)}: {line}: {wrong(line)}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("horovodrun -np 2 --hostz a:1 python train.py", "horovodrun"),
        ("python recipes/nothing.py", "no such file"),
        ("pip install 'a b'", "not a requirement"),
        ("scp a b", "unknown command"),
        ("tools/nothing", "no such file"),
        ("docker build --build-arg EXTRA=gpu .", "has no {'EXTRA'}"),
        ("docker run --rm tfdml tfdml lunch train.py", "no command lunch"),
    ],
)
def test_a_wrong_command_is_seen(line, message):
    assert message in wrong(line)


def wrong(line: str) -> str | None:
    """Returns what is wrong with a command line; None if it is known."""
    program, *words = shlex.split(line, comments=True)
    if program == "export":
        return None if re.match(r"[A-Z_]+=.", words[0]) else "not an assignment"
    if program == "tfdml":
        return mistake(words)
    if program == "horovodrun":
        known = {"-np", "--min-np", "--max-np", "--host-discovery-script", "-H", "--verbose"}
        own = words[: words.index("python")]
        unknown = {word for word in own if word.startswith("-")} - known
        return f"horovodrun has no {unknown}" if unknown else wrong(shlex.join(words[len(own) :]))
    if program == "python":
        return None if words[0] in SCRIPTS or (ROOT / words[0]).exists() else "no such file"
    if program == "docker":
        return _docker_mistake(words)
    if program == "pip":
        bad = [w for w in words[1:] if not w.startswith("dist/") and not _is_requirement(w)]
        return f"{bad} is not a requirement" if bad or words[0] != "install" else None
    if program.startswith("tools/"):
        return None if (ROOT / program).exists() else "no such file"
    if program == "rm":
        return None
    return "unknown command"


def _docker_mistake(words: list[str]) -> str | None:
    """Returns what is wrong with a command of Docker's; None if the Dockerfile knows all."""
    if words[0] == "run":
        # The command in the container comes after the image's name.
        inner = words[next(i for i, w in enumerate(words) if w.startswith("tfdml")) + 1 :]
        return wrong(shlex.join(inner)) if inner else None
    arguments = re.findall(r"^ARG (\w+)=", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    given = {words[i + 1].partition("=")[0] for i, w in enumerate(words) if w == "--build-arg"}
    unknown = given - set(arguments)
    if words[0] != "build" or unknown:
        return f"the Dockerfile has no {unknown or words[0]}"
    return None


def _is_requirement(word: str) -> bool:
    try:
        return bool(Requirement(word))
    except ValueError:
        return False


@ALL_PAGES
def test_yaml_can_be_read(page):
    for block in pages.blocks(page):
        if block.language == "yaml":
            assert yaml.safe_load(block.text)


@ALL_PAGES
def test_what_is_not_run_has_a_reason(page):
    for block in pages.blocks(page):
        if block.not_run:
            assert re.match(r"(needs|changes) an? \w+", block.not_run), block
            for file in re.findall(r"\b(?:tests|recipes)/[\w/]+(?:\.py)?", block.not_run):
                assert (ROOT / file).exists(), file
