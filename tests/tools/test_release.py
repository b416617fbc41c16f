from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
import release
import repo
import smoke_wheel
from release import ReleaseError

METADATA = (
    "License-Expression: Apache-2.0\nAuthor: z* maintainers\nKeywords: a,b\n"
    "Project-URL: Documentation, https://zstar.example/docs\n\n[format](https://zstar.example/source/FORMAT.md)\n"
)


@pytest.mark.parametrize("name", repo.PACKAGES)
def test_the_metadata_of_a_package_is_complete_and_its_readme_renders_on_an_index(name: str) -> None:
    assert release.problems(name) == []


def test_links_to_files_become_links_to_the_repository() -> None:
    text = release.rendered_readme("zengine")
    urls = release.settings("zengine")["urls"]
    assert isinstance(urls, dict)
    base = f"{urls['Source']}/blob/main"
    assert f"]({base}/packages/zengine/DEEPSPEED.md#buffers)" in text
    assert f"]({base}/tests/recovery/test_elastic.py)" in text


ADDRESSED = {  # other files that name an address of the project
    "": ("CITATION.cff", "docs/mkdocs.yml", "docs/pages/start.md"),
    "zengine": ("packages/zengine/src/zengine/pages.py",),
}


def copied(file: str, folder: Path) -> None:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(repo.ROOT / file, folder / file)


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with the files that a release changes."""
    for name in repo.PACKAGES:
        source = repo.source_folder(name).relative_to(repo.ROOT)
        files = [f"packages/{name}/{file}" for file in ("pyproject.toml", "CHANGELOG.md", "README.md", "LICENSE")]
        for file in [*files, f"{source}/__init__.py", f"{source}/py.typed", *ADDRESSED.get(name, ())]:
            copied(file, tmp_path)
    for file in ("LICENSE", *ADDRESSED[""]):
        copied(file, tmp_path)
    monkeypatch.setattr(repo, "ROOT", tmp_path)
    return tmp_path


def test_a_cut_writes_the_version_dates_the_changelog_and_widens_the_ranges_of_dependants(copy: Path) -> None:
    changelog = copy / "packages/zcomm/CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## 0.3.0", "## Unreleased\n\n- Faster.\n\n## 0.3.0", 1))
    release.cut("zcomm", "0.4.0", "2030-01-02")
    assert release.version_of("zcomm") == "0.4.0"
    assert '\n__version__ = "0.4.0"\n' in (copy / "packages/zcomm/src/zcomm/__init__.py").read_text()
    assert "## 0.4.0 (2030-01-02)\n\n- Faster.\n\n## 0.3.0" in changelog.read_text()
    for dependant in ("zpartition", "zengine"):
        assert "zcomm-torch>=0.4,<0.5" in repo.declared_dependencies(dependant)
    with pytest.raises(ReleaseError, match=r"0\.4\.0 \(2030-01-02\) is released already"):
        release.cut("zcomm", "0.4.0", "2030-01-03")
    with pytest.raises(ReleaseError, match=r"it has version 0\.4\.0, and versions only grow"):
        release.cut("zcomm", "0.3.9", "2030-01-03")


def test_a_patch_leaves_the_ranges(copy: Path) -> None:
    changelog = copy / "packages/zckpt/CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## 0.3.0", "## Unreleased\n\n- Mended.\n\n## 0.3.0", 1))
    release.cut("zckpt", "0.3.1", "2030-01-02")
    assert "zckpt>=0.3,<0.4" in repo.declared_dependencies("zengine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# Changelog\n\n## 0.2.0\n\n- Old.\n", "begins with '## 0.2.0': write `## Unreleased`"),
        ("# Changelog\n\n## Unreleased\n\n## 0.2.0\n\n- Old.\n", "no line `- ...`"),
        ("# Changelog\n", "begins with 'no heading'"),
    ],
)
def test_a_changelog_without_a_line_for_the_version_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ReleaseError, match=message):
        release.new_changelog(text, "0.3.0", "2030-01-02")


def test_one_command_changes_the_addresses_everywhere(copy: Path) -> None:
    release.address("https://code.test/zstar/", "https://zstar.test")
    release.check(repo.PACKAGES, publish=True)
    assert "](https://code.test/zstar/blob/main/packages/zckpt/bench" in release.rendered_readme("zckpt")
    assert 'SITE = "https://zstar.test"\n' in (copy / ADDRESSED["zengine"][0]).read_text()
    assert "git clone https://code.test/zstar zstar" in (copy / "docs/pages/start.md").read_text()
    assert not [path for path in copy.rglob("*") if path.is_file() and "zstar.example" in path.read_text()]


def test_placeholders_of_addresses_are_not_published(copy: Path) -> None:
    release.address("https://code.example/zstar", "https://zstar.test")
    release.check(["zckpt"], publish=False)
    with pytest.raises(
        ReleaseError, match=r"zckpt: pyproject\.toml: https://code\.example is a placeholder: set the"
    ):
        release.check(["zckpt"], publish=True)
    release.address("https://code.test/zstar", "https://zstar.example")
    with pytest.raises(
        ReleaseError, match=r"zengine: src/zengine/pages\.py: https://zstar\.example is a placeholder"
    ):
        release.check(["zengine"], publish=True)


def test_no_other_file_names_an_address() -> None:
    known = {path for files in ADDRESSED.values() for path in files}
    known |= {f"packages/{name}/pyproject.toml" for name in repo.PACKAGES} | {"tests/tools/test_release.py"}
    urls = release.settings("zengine")["urls"]
    assert isinstance(urls, dict)
    wanted = [urls[key].encode() for key in ("Documentation", "Source")]
    found = {path.relative_to(repo.ROOT).as_posix(): path.read_bytes() for path in repo.files()}
    assert {name for name, content in found.items() if any(url in content for url in wanted)} <= known


def make_wheel(path: Path, metadata: str, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("zx-1.dist-info/METADATA", metadata)
        for name in names:
            archive.writestr(name, "")
    return path


def test_the_contents_of_a_wheel_are_judged(tmp_path: Path) -> None:
    needed = ("zx/py.typed", "zx-1.dist-info/licenses/LICENSE")
    sound = make_wheel(tmp_path / "zx-1-py3-none-any.whl", METADATA, *needed)
    assert release.content_problems(sound) == []
    bad = make_wheel(tmp_path / "zx-1-cp310-abi3-linux_x86_64.whl", "[a](b.md)\n")
    assert release.content_problems(bad) == [
        "compiled code and tag do not agree",
        "no py.typed",
        "a tag of this machine, not of manylinux",
        "no LICENSE",
        "README: relative link ](b.md)",
        "METADATA without 'License-Expression: Apache-2.0'",
        "METADATA without 'Author: z* maintainers'",
        "METADATA without 'Keywords: '",
        "METADATA without 'Project-URL: Documentation'",
    ]


def test_every_package_is_tried_and_a_wrong_name_is_told() -> None:
    assert list(smoke_wheel.USES) == list(repo.PACKAGES)
    with pytest.raises(ReleaseError, match="no package zopt: choose from zcomm, "):
        release.selected(["zopt"])


def test_a_bill_of_materials_names_no_file_of_this_machine() -> None:
    local, known = {"type": "distribution", "url": "file:///a/b.whl"}, {"type": "vcs", "url": "https://x.test"}
    bill = {"components": [{"name": "zoptim", "externalReferences": [local, known]}]}
    assert release.without_local_files(bill) == {"components": [{"name": "zoptim", "externalReferences": [known]}]}


def test_without_distributions_the_remedy_is_told(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"run `tools/release\.py build all` first"):
        release.judge(tmp_path)
