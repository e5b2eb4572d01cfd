"""What `make docs` checks in the built site: every link and anchor leads somewhere, and a browser fetches nothing.

`python tests/helpers/site_check.py build/site`. Links to other sites are not followed: the build needs no network.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""What a browser loads by itself. A `link` that only says where a page belongs is not loaded."""
NOT_LOADED = {"canonical", "index", "search", "next", "prev", "author", "copyright"}


class Page(HTMLParser):
    """A page's anchors, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if found.get(FETCHED.get(tag, "")) and not NOT_LOADED & set(found.get("rel", "").split()):
            self.loads.append(found[FETCHED[tag]])


def html_files(site: Path) -> list[Path]:
    """The pages; the theme keeps templates of its own beside its style sheets."""
    return [file for file in sorted(site.rglob("*.html")) if "_static" not in file.relative_to(site).parts]


def problems(site: Path) -> list[str]:
    """One line for each broken link and each thing that would be fetched from elsewhere."""
    pages = {file: Page(file.read_text(encoding="utf8")) for file in html_files(site)}
    found = []
    for file, page in pages.items():
        where = file.relative_to(site)
        found += [f"{where}: loads {url}" for url in page.loads if is_elsewhere(url)]
        for link in [*page.links, *page.loads]:
            if not is_elsewhere(link) and (why := broken(file, link, pages)):
                found.append(f"{where}: {link}: {why}")
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf8")
        if "@import url(http" in text or "url(http" in text.replace("'", "").replace('"', ""):
            found.append(f"{style.relative_to(site)}: loads from elsewhere")
    return found


def is_elsewhere(link: str) -> bool:
    parts = urlsplit(link)
    return bool(parts.netloc) or parts.scheme in ("http", "https", "mailto")


def broken(file: Path, link: str, pages: dict[Path, Page]) -> str:
    """Why a link of a page leads nowhere; nothing if it does not."""
    parts = urlsplit(link)
    if parts.scheme == "data":
        return ""
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return "no such file"
    known = pages.get(target)
    if parts.fragment and known and unquote(parts.fragment) not in known.anchors:
        return "no such anchor"
    return ""


if __name__ == "__main__":
    site = Path(sys.argv[1]).resolve()
    found = problems(site)
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.stdout.write(f"{len(html_files(site))} pages, {len(found)} problems\n")
    sys.exit(bool(found))
