"""Links of errors lead to pages and headings of the site."""

from __future__ import annotations

import pickle
import re
import traceback

import attrs
import docs
import pytest
import repo

import zengine
import zengine.pages
from zengine.cli import main
from zengine.config import load
from zengine.engine.clock import CallOrderError, HalfLoaded
from zengine.pages import SITE, Page, where, with_notes

SOURCES = {"reference/config.md": Page.CONFIG.source}  # of pages that exist elsewhere: docs/hooks.py


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site below an address that is no placeholder."""
    monkeypatch.delenv("ZENGINE_DOCS", raising=False)
    monkeypatch.setattr(zengine.pages, "SITE", "https://zstar.test/docs")


def slugs(text: str) -> list[str]:
    """Return the anchors of a page, as the site makes them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return [re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", Page)
def test_every_linked_page_and_heading_exists(page: Page) -> None:
    name, _, anchor = page.value.partition("#")
    name = name.replace(".html", ".md")
    path = repo.ROOT / SOURCES[name] if name in SOURCES else docs.PAGES / name
    assert path.is_file(), path
    assert not anchor or anchor in slugs(path.read_text(encoding="utf-8")), anchor


@pytest.mark.parametrize("page", Page)
def test_the_source_of_every_page_exists_with_its_heading(page: Page) -> None:
    name, _, anchor = page.source.partition("#")
    text = (repo.ROOT / name).read_text(encoding="utf-8")
    assert not anchor or anchor in slugs(text), anchor


def test_a_placeholder_is_no_link_and_the_variable_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert where(Page.CONFIG) == "See https://zstar.test/docs/reference/config.html"
    monkeypatch.setattr(zengine.pages, "SITE", "https://place.example/docs")
    assert where(Page.CHECKPOINTS) == (
        "See docs/pages/tutorials/checkpoints.md in the repository. "
        "ZENGINE_DOCS=ADDRESS or FOLDER of the built site makes this a link."
    )
    monkeypatch.setenv("ZENGINE_DOCS", "/srv/site/")
    assert where(Page.CHECKPOINTS) == "See /srv/site/tutorials/checkpoints.html"
    monkeypatch.setenv("ZENGINE_DOCS", "http://[::1")  # what is no address does not hide the error
    assert where(Page.CHECKPOINTS) == "See http://[::1/tutorials/checkpoints.html"


def test_the_address_and_the_places_are_those_of_the_site() -> None:
    assert f"site_url: {SITE}/\n" in (docs.DOCS / "mkdocs.yml").read_text(encoding="utf-8")
    hooks = (docs.DOCS / "hooks.py").read_text(encoding="utf-8")
    assert all(f'"{source}": "{page}"' in hooks for page, source in SOURCES.items())


def test_every_page_explains_some_error() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in repo.source_modules("zengine"))
    assert [page.name for page in Page if f"@explained(Page.{page.name})" not in text] == []


def test_an_error_ends_in_the_link_in_tracebacks_and_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    link = "See https://zstar.test/docs/reference/config.html"
    with pytest.raises(zengine.ConfigError) as caught:
        load({"train_batch": 8})
    assert link not in str(caught.value)
    assert traceback.format_exception(caught.value)[-1].strip() == link
    assert with_notes(caught.value) == f"{caught.value}\n{link}"
    main(["check", '{"train_batch": 8}'])
    assert capsys.readouterr().err.endswith(f"\n{link}\n")


def test_a_subclass_has_one_link() -> None:
    assert HalfLoaded("x").__notes__ == CallOrderError("x").__notes__
    assert len(HalfLoaded("x").__notes__) == 1


def test_a_link_survives_the_trip_from_another_process() -> None:
    with pytest.raises(zengine.ConfigError) as caught:
        load({"train_batch": 8})
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.__notes__ == caught.value.__notes__
    assert attrs.asdict(again.problems[0]) == attrs.asdict(caught.value.problems[0])
