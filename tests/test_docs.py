"""README and docs: Python blocks run and print what stands there, files that are named exist, refusals are explained.

`pytest tests/test_docs.py --update-golden` rewrites the outputs and the table of README.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from messages import FUSEJIT, GAP, Message, Source

ROOT = FUSEJIT.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "CONTRIBUTING.md", README]
NEEDS_GPU = "<!-- needs a GPU -->"
OUTPUT = "<!-- output -->"
FENCE = re.compile(
    r"^(?P<above>[^\n]*)\n(?P<fence>```+)(?P<kind>[^\n`]*)\n(?P<text>(?:.*?\n)??)(?P=fence)[ ]*$",
    re.DOTALL | re.MULTILINE,
)
SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
PATH = re.compile(r"(?:[\w.-]+/)+(?:[\w.-]+)?|[\w-]+\.(?:md|toml|yml)|\.ci/run")
WORDS = 25
LINES = 60

# What the source calls where it refuses something, and how many of the arguments are texts; what explain() alone says.
REFUSALS = {
    ("Unsupported", "Fallback"): 2,
    (
        "CaptureError",
        "ArgumentError",
        "NoCallError",
        "BackendError",
        "TraceError",
        "CompileError",
        "KernelAssertion",
        "FusejitError",
    ): 1,
    ("CheckFailed", "NotRewritten", "Unclear", "NoSource", "Mismatch"): 1,
}
KEPT_APART = ("Refused", "NoSelect", "NotLocal")
UNSEEN = ("NotPlain", "Usage", "Unrepeatable")  # caught by fusejit itself, without a word to the user; a command line's
REASONS = ("why_wrapped", "why_not_select", "why_not", "waits")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page: the line above it, its kind, its text, and the offsets of that in the page."""

    above: str
    kind: str
    text: str
    span: tuple[int, int]


def blocks(page: Path) -> list[Block]:
    return [
        Block(m["above"].strip(), m["kind"].strip(), m["text"], m.span("text"))
        for m in FENCE.finditer(page.read_text())
    ]


def outside_blocks(page: Path) -> str:
    return FENCE.sub(lambda m: m["above"] + "\n", page.read_text())


def spans(text: str) -> list[str]:
    """The code spans of some Markdown, as a reader sees them."""
    return [code[1:-1] if code[0] == code[-1] == " " and code.strip() else code for _, code in SPAN.findall(text)]


def steady(text: str) -> str:
    """What a program prints, without what differs from run to run: milliseconds."""
    return re.sub(r"\d+ ms", "… ms", text).strip()


# -- blocks ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run_and_print_what_is_shown(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The Python blocks of a page share their names, each is a file `model.py` of its own."""
    names: dict[str, Any] = {"__name__": "model"}
    printed, changed = "", []
    for number, block in enumerate(blocks(page)):
        if block.kind == "python":
            code = ast.parse(block.text)
            if block.above == NEEDS_GPU:
                continue
            path = tmp_path / str(number) / "model.py"
            path.parent.mkdir()
            path.write_text(block.text)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(code, str(path), "exec", dont_inherit=True), names)
            printed = out.getvalue()
        elif block.above == OUTPUT and steady(printed) != steady(block.text):
            changed.append((block.span, printed))
    if request.config.getoption("--update-golden"):
        text = page.read_text()
        for (begin, end), printed in reversed(changed):
            text = f"{text[:begin]}{printed}{text[end:]}"
        page.write_text(text)
        return
    assert not changed, f"{page.name} shows something else than (--update-golden replaces it):\n" + "\n".join(
        p for _, p in changed
    )


# -- words -------------------------------------------------------------------------------------------------------------
@cache
def source() -> Source:
    return Source(FUSEJIT)


@cache
def refusals() -> list[Message]:
    return [
        message
        for classes, arguments in REFUSALS.items()
        for message in source().messages(*classes, arguments=arguments)
    ]


@cache
def reasons() -> list[Message]:
    return source().messages(*KEPT_APART) + [message for name in REASONS for message in source().returned(name)]


def has_more_general(text: str, texts: Collection[str]) -> bool:
    """Whether another text of the same message has a gap where this one has words."""
    patterns = (re.escape(other).replace(re.escape(GAP), ".+") for other in texts if other != text)
    return any(re.fullmatch(pattern, text) for pattern in patterns)


PLACES = {"troubleshooting.md": refusals, "reading-explain.md": reasons}


@pytest.mark.parametrize("page", PLACES)
def test_every_refusal_is_explained(page: str) -> None:
    shown = "\n".join(spans((DOCS / page).read_text()))
    messages = PLACES[page]()
    assert len(messages) > 40
    missing = {
        text: message.where
        for message in messages
        for text in message.texts
        if text.strip(GAP + "\n") not in shown and not has_more_general(text, message.texts)
    }
    rows = [f"| `{text}` | what it means | what to write instead |   <- {where}" for text, where in missing.items()]
    assert not rows, (
        f"docs/{page} does not explain {len(rows)} messages; add rows (double backticks around a backtick):\n"
        + "\n".join(rows)
    )


@pytest.mark.parametrize("page", PLACES)
def test_no_message_is_explained_that_nobody_sees(page: str) -> None:
    """The first cell of each row of a table that begins with "message" or "reason" holds words of the source."""
    known = {text.strip(GAP + "\n") for message in (*refusals(), *reasons()) for text in message.texts}
    stale, collecting = [], False
    for line in (DOCS / page).read_text().splitlines():
        collecting = line.startswith(("| message |", "| reason |")) or (collecting and line.startswith("|"))
        if collecting:
            stale += [span for span in spans(line.split(" | ")[0]) if not any(text in span for text in known)]
    assert not stale, f"docs/{page} explains what the source does not say any more: {stale}"


def test_every_class_of_errors_is_read() -> None:
    listed = {name for names in (*REFUSALS, KEPT_APART, UNSEEN) for name in names}
    assert not source().exceptions() - listed, (
        "a class of errors whose messages no page explains: put it into REFUSALS or KEPT_APART"
    )


SAMPLE = """
from .words import HINT
WHY = "it is blue"
TABLE = {1: ("a sky", WHY), 2: ("a sea", f"{WHY}; {HINT}")}
KINDS = (("a lake", "it is wet"), ("a pond", "it is small"))

def constant(): raise Unsupported("a hill", "it is " + "steep")
def filled(name): raise Unsupported(f"a hill called {name}", reason=f"{name!r} has {len(name)} letters")
def table(x):
    op, reason = TABLE[x]
    raise Unsupported(op, reason)
def rows():
    for op, reason in KINDS:
        raise Unsupported(op, reason)
def why(x): return "it is far" if x else WHY
def function(x):
    if reason := why(x):
        raise Unsupported("a town", reason)
def passed(reason): raise Unsupported("a road", f"its end {reason}")
def caller(): passed("is near")
"""


def test_messages_are_read_however_they_are_written(tmp_path: Path) -> None:
    """Constants, f-strings, tables, loops over them, functions that return texts, what callers give, imported words."""
    (tmp_path / "words.py").write_text('HINT = "look up"')
    (tmp_path / "sample.py").write_text(SAMPLE)
    texts = {text for message in Source(tmp_path).messages("Unsupported", arguments=2) for text in message.texts}
    assert texts == {
        *(
            "a hill",
            "it is steep",
            "a hill called …",
            "… has … letters",
            "a sky",
            "a sea",
            "it is blue",
            "it is blue; look up",
        ),
        *("a lake", "it is wet", "a pond", "it is small", "a town", "it is far", "a road", "its end is near"),
    }


# -- names -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_links_exist(page: Path) -> None:
    text = outside_blocks(page)
    missing = []
    for span in spans(text):
        path = span.split("::")[0]
        if PATH.fullmatch(path) and not any((folder / path).exists() for folder in (ROOT, FUSEJIT, DOCS)):
            missing.append(span)
    for target in re.findall(r"\]\(([^)\s]+)\)", SPAN.sub("", text)):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (page.parent / path) if path else page
        headings = (
            re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if file.suffix == ".md" and file.exists() else []
        )
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
        if not file.exists() or (anchor and anchor not in slugs):
            missing.append(target)
    assert not missing, f"{page.name} names what is not there: {missing}"


def test_the_knobs_and_the_names_of_the_package_are_documented() -> None:
    import fusejit
    from fusejit.knobs import KNOBS

    text = (DOCS / "index.md").read_text()
    for knob in KNOBS.values():
        assert f"| `{knob.variable}` |" in text and knob.meaning in text
    shown = "\n".join(spans("".join(outside_blocks(page) for page in PAGES)))
    unknown = [name for name in fusejit.__all__ if not re.search(rf"\b{name}\b", shown)]
    assert not unknown, f"no page names {unknown}"


# -- README ------------------------------------------------------------------------------------------------------------
def test_readme_is_one_screen_of_short_sentences() -> None:
    assert README.read_text().count("\n") <= LINES
    prose = "\n".join(line for line in outside_blocks(README).splitlines() if not line.startswith(("|", "#", "<!--")))
    prose = SPAN.sub("code", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", prose))
    sentences = re.split(r"(?<=[.:;?!])\s+|\n\s*\n|\n[*-] ", prose)
    long = [sentence for sentence in sentences if len(sentence.split()) > WORDS]
    assert not long, f"sentences of more than {WORDS} words: {long}"


def test_readme_has_its_two_commands() -> None:
    text = README.read_text()
    assert "pip install -e '.[test]' && pytest" in text and "fusejit bench" in text


def test_readme_shows_the_table_of_the_committed_results(request: pytest.FixtureRequest) -> None:
    mode = "--write" if request.config.getoption("--update-golden") else "--check"
    script = ROOT / "perf" / "scripts" / "readme_table.py"
    done = subprocess.run([sys.executable, str(script), mode], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


# -- the changelog -----------------------------------------------------------------------------------------------------
def test_the_changelog_keeps_its_form() -> None:
    """Keep a Changelog: sections by kind, one line a change."""
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    kinds = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
    body = lines[next(number for number, line in enumerate(lines) if line.startswith("## ")) :]
    other = [
        line
        for line in body
        if line and not line.startswith(("* ", "## ")) and line not in [f"### {kind}" for kind in kinds]
    ]
    assert not other, f"each change is one line that begins with '* ', below ### {', '.join(kinds)}: {other}"


# -- the site and the archive ------------------------------------------------------------------------------------------
def test_the_site_has_every_page() -> None:
    listed = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {page.name for page in DOCS.glob("*.md")} <= listed


def test_the_archive_holds_what_a_packager_needs() -> None:
    """MANIFEST.in names what stands beside the package; building an archive takes a network, so its words are read."""
    manifest = (ROOT / "MANIFEST.in").read_text()
    for name in ("tests", "perf", "docs", "CHANGELOG.md", "CONTRIBUTING.md", "mkdocs.yml"):
        assert re.search(rf"^(graft|include|recursive-include) .*{re.escape(name)}", manifest, re.MULTILINE), name
