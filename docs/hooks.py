"""Pages of the site that exist elsewhere in the repository, and diagrams drawn when it is built.

Texts are written once: READMEs, DEEPSPEED.md, CONFIG.md (made from the key table), changelogs and tables of figures
become pages as they are; their links are changed to the pages of the site or, for files that are no page, to the
repository.  `<!-- section: README.md ## Comparison -->` inserts a section of a file.  A page of API per package lists
the names of tests/architecture/public_api.txt for mkdocstrings.

The search index is written as a script, too: a browser that reads the pages from a folder fetches no JSON, and runs
no worker (assets/folder-worker.js).  As long as the repository has no public address, links to its files lead
into the checkout that the site was built from.

Mermaid blocks become SVG here: a script of three megabytes, from a network or not, draws three small graphs worse.
"""

from __future__ import annotations

import ast
import html
import itertools
import logging
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("zengine", "zpartition", "zoptim", "zckpt", "zcomm", "zprecision")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
SECTION = re.compile(r"^<!-- section: (\S+) (#+ .+?) -->$", re.MULTILINE)
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RECT = (
    '<rect x="{x}" y="{y}" width="{box}" height="{high}" rx="6" fill="#5c6bc0" fill-opacity=".15" '
    'stroke="currentColor" stroke-opacity=".5"/>'
)
ARROW = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
)
API = """---
search:
  boost: 0.5
---
# API of {package}

Every public name, with its module. The [package's page](../packages/{package}.md) shows how they work together.

"""


def pages() -> dict[str, str]:
    """Return file of the repository -> page of the site."""
    found = {
        "ARCHITECTURE.md": "concepts/architecture.md",
        "CONTRIBUTING.md": "project/contributing.md",
        "SECURITY.md": "project/security.md",
        "packages/zckpt/FORMAT.md": "concepts/format.md",
        "packages/zengine/CONFIG.md": "reference/config.md",
        "packages/zengine/DEEPSPEED.md": "reference/deepspeed.md",
    }
    for package in PACKAGES:
        found[f"packages/{package}/README.md"] = f"packages/{package}.md"
        found[f"packages/{package}/CHANGELOG.md"] = f"changelog/{package}.md"
        found[f"packages/{package}/DESIGN.md"] = f"concepts/design-{package}.md"
        for path in sorted((ROOT / "packages" / package / "bench" / "results").glob("*.md")):
            found[path.relative_to(ROOT).as_posix()] = f"figures/{package}/{path.stem}.md"
    return found


PAGES = pages()


IMAGES: dict[str, str] = {}  # file of the repository -> file of the site, of the pictures that pages show


def relative_link(target: str, page: str) -> str:
    return os.path.relpath(target, os.path.dirname(page) or ".").replace(os.sep, "/")


def moved(target: str, source: str, page: str, repository: str, is_image: bool) -> str:
    """Return a link of a file of the repository as a link of the page that it becomes."""
    if target.startswith(("http://", "https://", "#", "mailto:")):
        return target
    path, _, anchor = target.partition("#")
    place = os.path.normpath(os.path.join(os.path.dirname(source), path)).replace(os.sep, "/")
    if is_image and (ROOT / place).is_file():
        IMAGES[place] = f"assets/{place.replace('/', '-')}"
        return relative_link(IMAGES[place], page)
    if place in PAGES:
        return relative_link(PAGES[place], page) + (f"#{anchor}" if anchor else "")
    kind = "tree" if (ROOT / place).is_dir() else "blob"
    return f"{repository}/{kind}/main/{place}"


def adapt(text: str, source: str, page: str, repository: str) -> str:
    """Return the text of a file as a page: links moved, none inside code."""

    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        return f"{mark}[{label}]({moved(target, source, page, repository, bool(mark))})"

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def definitions(package: str) -> dict[str, list[str]]:
    """Return name -> modules of a package that define a class or function of this name."""
    found: dict[str, list[str]] = {}
    source = ROOT / "packages" / package / "src"
    for path in sorted(source.rglob("*.py")):
        module = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.setdefault(node.name, []).append(module)
    return found


def place_of(name: str, loader: Any, defined: dict[str, list[str]]) -> str:
    """Return the path that mkdocstrings finds a public name by; "" if it is made at run time."""
    modules = defined.get(name.rpartition(".")[2], [])
    below = [module for module in modules if module.startswith(name.rpartition(".")[0])]
    if len(below) == 1 or len(modules) == 1:
        return f"{(below if len(below) == 1 else modules)[0]}.{name.rpartition('.')[2]}"
    try:
        found = loader.modules_collection[name]
        return name if not found.is_alias or found.final_target else ""
    except (griffe.GriffeError, KeyError):
        return ""


def api_page(package: str) -> str:
    """Return the page of a package's public names."""
    loader = griffe.GriffeLoader(search_paths=[ROOT / "packages" / name / "src" for name in PACKAGES])
    loader.load(package)
    loader.resolve_aliases()
    defined = definitions(package)
    names = (ROOT / "tests/architecture/public_api.txt").read_text().splitlines()
    mine = [name for name in names if name.split(".")[0] == package and not name.startswith("zengine.deepspeed.")]
    blocks, module = [], ""
    for name in sorted(mine, key=lambda name: (name.rpartition(".")[0].count("."), name.rpartition(".")[0], name)):
        if name.rpartition(".")[0] != module:
            module = name.rpartition(".")[0]
            blocks.append(f"## {module} {{ .module }}\n")
        place = place_of(name, loader, defined)
        blocks.append(f"::: {place}\n    options:\n      heading_level: 3\n" if place else f"- `{name}`\n")
    return API.format(package=package) + "\n".join(blocks)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are written elsewhere."""
    for handler in logging.getLogger("mkdocs").handlers:  # zoptim's __all__ is made of its table of optimizers
        handler.addFilter(lambda record: "Unsupported item in zoptim.__all__" not in record.getMessage())
    repository = config.repo_url.rstrip("/")
    for source, page in PAGES.items():
        text = adapt((ROOT / source).read_text(encoding="utf-8"), source, page, repository)
        files.append(File.generated(config, page, content=text))
    for source, image in IMAGES.items():
        files.append(File.generated(config, image, abs_src_path=str(ROOT / source)))
    for package in PACKAGES:
        files.append(File.generated(config, f"api/{package}.md", content=api_page(package)))
    return files


def section(source: str, heading: str, page: str, repository: str) -> str:
    """Return the text below a heading of a file, up to the next heading of its level."""
    text = (ROOT / source).read_text(encoding="utf-8")
    if f"{heading}\n" not in text:
        raise ValueError(f"{page}: {source} has no heading {heading!r}")
    level = heading.split(" ")[0]
    body = text.partition(f"{heading}\n")[2]
    return adapt(re.split(rf"^#{{1,{len(level)}}} ", body, flags=re.MULTILINE)[0], source, page, repository)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Insert sections of other files, and draw diagrams."""
    repository, path = config.repo_url.rstrip("/"), page.file.src_uri
    text = SECTION.sub(lambda match: section(match[1], match[2], path, repository), markdown)
    return MERMAID.sub(lambda match: diagram(match[1]), text)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Link files of the checkout instead of a repository that has no public address yet (a name below .example)."""
    repository = config.repo_url.rstrip("/")
    if not (urlsplit(repository).hostname or "").endswith(".example"):
        return output
    root = os.path.relpath(ROOT, Path(config.site_dir, page.file.dest_uri).parent).replace(os.sep, "/")
    return re.sub(rf'(?<=href="){re.escape(repository)}(?:/(?:blob|tree)/main)?(?=[/"])', root, output)


def on_post_build(config: Any) -> None:
    """Write the search index as the script that the theme loads in place of the JSON where pages have no server."""
    folder = Path(config.site_dir) / "search"
    index = (folder / "search_index.json").read_text(encoding="utf-8")
    (folder / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")


# --- diagrams


def parse(text: str) -> tuple[bool, dict[str, str], list[tuple[str, str]]]:
    """Read a mermaid graph: whether it runs to the right, its labels, its edges."""
    labels: dict[str, str] = {}
    edges: list[tuple[str, str]] = []
    for line in text.splitlines():
        for name, label in re.findall(r'(\w+)\["([^"]*)"\]', line):
            labels[name] = label
        ends = [re.match(r"\s*(\w+)", part) for part in line.split("-->")]
        names = [match[1] for match in ends if match]
        edges += list(itertools.pairwise(names))
    for name in {name for edge in edges for name in edge}:
        labels.setdefault(name, name)
    return "graph LR" in text, labels, edges


def depths(labels: dict[str, str], edges: list[tuple[str, str]]) -> dict[str, int]:
    """Return the length of the longest path to each node."""
    found = dict.fromkeys(labels, 0)
    for _ in labels:
        for start, end in edges:
            found[end] = max(found[end], found[start] + 1)
    return found


def wrapped(label: str, width: int) -> list[str]:
    lines: list[str] = []
    for part in label.split("<br/>"):
        line = ""
        for word in part.split():
            if line and len(line) + len(word) >= width:
                lines.append(line)
                line = ""
            line = f"{line} {word}".strip()
        lines.append(line)
    return lines


def diagram(text: str) -> str:
    """Draw a small graph as SVG, in the text's colour.  Long chains to the right are folded into rows."""
    to_right, labels, edges = parse(text)
    depth = depths(labels, edges)
    rows: dict[int, list[str]] = {}
    for name in labels:
        rows.setdefault(depth[name], []).append(name)
    is_chain = to_right and all(len(row) == 1 for row in rows.values())
    box, high, gap, fold = 168, 78, 28, 4
    widest = max(len(row) for row in rows.values())
    place = {
        name: (
            (level % fold if is_chain else index + (widest - len(row)) / 2) * (box + gap),
            (level // fold if is_chain else level) * (high + gap + 12),
        )
        for level, row in rows.items()
        for index, name in enumerate(row)
    }
    wide, tall = max(x for x, _ in place.values()) + box, max(y for _, y in place.values()) + high
    out = [f'<svg role="img" viewBox="-4 -4 {wide + 8} {tall + 8}" xmlns="http://www.w3.org/2000/svg">', ARROW]
    for start, end in edges:
        (x0, y0), (x1, y1) = place[start], place[end]
        if y0 == y1:
            line = f"M{x0 + box} {y0 + high / 2}L{x1} {y1 + high / 2}"
        else:
            line = f"M{x0 + box / 2} {y0 + high}L{x1 + box / 2} {y1}"
        out.append(f'<path d="{line}" fill="none" stroke="currentColor" opacity=".6" marker-end="url(#tip)"/>')
    for name, (x, y) in place.items():
        out.append(RECT.format(x=x, y=y, box=box, high=high))
        lines = wrapped(labels[name], 27)
        for index, line in enumerate(lines):
            height = y + high / 2 + 4 + 14 * (index - (len(lines) - 1) / 2)
            middle = f'x="{x + box / 2}" y="{height}" text-anchor="middle" font-size="11.5"'
            out.append(f"<text {middle}>{html.escape(line)}</text>")
    return "\n".join(['<div class="figure">', *out, "</svg>", "</div>"])
