#!/usr/bin/env python3
"""Release a package: check its metadata, cut its version, build its distributions, judge and try them.

    python3 tools/release.py check                   metadata, licences and links of all packages
    python3 tools/release.py cut zoptim 0.4.0        version, changelog, ranges of dependants
    python3 tools/release.py build zoptim [...]      dist/: source archive, wheels (manylinux and pure)
    python3 tools/release.py judge                   twine, auditwheel and the contents of everything in dist/
    python3 tools/release.py smoke                   every wheel in dist/ in a fresh environment, without a compiler
    python3 tools/release.py sbom                    dist/NAME.cdx.json: what an installation brings (CycloneDX)
    python3 tools/release.py address --source URL --docs URL

A package is released alone; `all` names the six.  Addresses of the project stand in the pyproject.toml of the
packages, because each is built alone, in the errors that end in a link to the site, and in the site's own settings;
`address` changes them everywhere, and `check --publish` rejects placeholders (names below .example, which RFC 2606
reserves) in all that a wheel or an index would show.

`build` makes two wheels of a package with kernels: one with compiled code for this platform, tagged by auditwheel,
and one without (`ZBUILD=pure`), which an index gives to all other platforms.  Wheels for other platforms are built by
.github/workflows/wheels.yml only.

Standard library only; tools come from requirements-release.txt and are installed into .cache/release.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import devenv
import repo
import tomllib

DIST = repo.ROOT / "dist"
TOOLS = repo.ROOT / ".cache" / "release"
REQUIREMENTS = repo.ROOT / "tools" / "requirements-release.txt"
SMOKE = repo.ROOT / "tools" / "smoke_wheel.py"
URL_KEYS = ("Documentation", "Source", "Issues", "Changelog")
PLACEHOLDER = re.compile(r"https://[\w.-]+\.example(?=[/\s\"')]|$)")
ADDRESSED = (".toml", ".cff", ".yml", ".md", ".py")  # kinds of files that name addresses of the project
RELATIVE_LINK = re.compile(r"\]\((?!https://|#)[^)\s]+\)")

WARNINGS = {"zprecision": 1, "zoptim": 1}  # of the pure wheel: one says why torch serves; zcomm's needs two ranks


class ReleaseError(Exception):
    """Raised when a release cannot go on; the message says what to do."""


def say(text: str) -> None:
    print(f"release: {text}", flush=True)


def settings(name: str) -> dict[str, object]:
    """Return the table `[project]` of a package."""
    project: dict[str, object] = tomllib.loads((repo.package_folder(name) / "pyproject.toml").read_text())["project"]
    return project


def version_of(name: str) -> str:
    return str(settings(name)["version"])


def wheel_stem(name: str) -> str:
    return repo.DISTRIBUTIONS[name].replace("-", "_")


# --- check


def problems(name: str) -> list[str]:
    """Return what an index, or a reader of it, would miss in the metadata of a package."""
    project, found = settings(name), []
    wanted = ("description", "license", "license-files", "authors", "keywords", "classifiers", "urls")
    found += [f"no {key}" for key in wanted if not project.get(key)]
    urls = project.get("urls")
    if isinstance(urls, dict):
        found += [f"no URL of {key}" for key in URL_KEYS if not str(urls.get(key, "")).startswith("https://")]
    if project.get("authors") != [{"name": "z* maintainers"}]:
        found.append('authors are not [{ name = "z* maintainers" }]')
    licence = repo.package_folder(name) / "LICENSE"
    if not licence.exists() or licence.read_bytes() != (repo.ROOT / "LICENSE").read_bytes():
        found.append("LICENSE is not a copy of the repository's")
    if not (repo.source_folder(name) / "py.typed").exists():
        found.append("no py.typed")
    links = RELATIVE_LINK.findall(rendered_readme(name))
    return found + [f"README: {link} is relative on an index" for link in links]


def rendered_readme(name: str) -> str:
    """Return the README of a package as its distributions have it, with the substitutions of its pyproject.toml."""
    folder = repo.package_folder(name)
    table = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    text = (folder / "README.md").read_text(encoding="utf-8")
    for rule in table["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    return text


def check(names: Sequence[str], publish: bool) -> None:
    """Raise ReleaseError with everything that is wrong in the metadata of the packages."""
    found = [f"{name}: {problem}" for name in names for problem in problems(name)]
    if publish:
        remedy = "is a placeholder: set the real ones by `tools/release.py address`"
        found += [f"{name}: {place} {remedy}" for name in names for place in placeholders(name)]
    if found:
        raise ReleaseError("\n".join(["the metadata is incomplete:", *found]))
    say(f"metadata, licences and links of {', '.join(names)}: ok")


def placeholders(name: str) -> list[str]:
    """Return the files of a package's distributions that name a placeholder, with the first of each."""
    folder = repo.package_folder(name)
    shown = [folder / "pyproject.toml", folder / "README.md", *repo.files(".py", under=repo.source_folder(name))]
    hits = {path: PLACEHOLDER.search(path.read_text(encoding="utf-8")) for path in shown}
    return [f"{path.relative_to(folder).as_posix()}: {hit[0]}" for path, hit in hits.items() if hit]


def address(source: str, docs: str) -> None:
    """Replace the addresses of the repository and of its documentation in every file that names them."""
    if not (source.startswith("https://") and docs.startswith("https://")):
        raise ReleaseError(f"--source {source} --docs {docs}: give two addresses that begin with https://")
    urls = settings("zengine")["urls"]
    assert isinstance(urls, dict)
    changed = 0
    for path in repo.files(*ADDRESSED, under=repo.ROOT):
        old = path.read_text(encoding="utf-8")
        text = old.replace(urls["Source"], source.rstrip("/")).replace(urls["Documentation"], docs.rstrip("/"))
        if text != old:
            path.write_text(text, encoding="utf-8")
            changed += 1
    say(f"addresses are {source} and {docs}, in {changed} files")


# --- cut


def numbers(version: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ReleaseError(f"version {version!r}: write it as MAJOR.MINOR.PATCH, such as 0.4.0")
    return tuple(map(int, version.split(".")))


def new_changelog(text: str, version: str, date: str) -> str:
    """Return a changelog whose newest section, `## Unreleased` or `## version`, is `## version (date)`.

    Raises ReleaseError if there is neither, if it is empty, or if the version is out already.
    """
    heading = re.search(r"^## (\S+)(.*)$", text, re.MULTILINE)
    if heading is None or heading[1] not in ("Unreleased", version):
        first = heading[0] if heading else "no heading"
        raise ReleaseError(f"the changelog begins with {first!r}: write `## Unreleased` and a line for each change")
    if heading[2].strip():
        raise ReleaseError(f"{heading[0][3:]} is released already: choose a higher version")
    section = text[heading.end() :].partition("\n## ")[0]
    if not re.search(r"^- \S", section, re.MULTILINE):
        raise ReleaseError("the newest section of the changelog has no line `- ...`: say what changed")
    return f"{text[: heading.start()]}## {version} ({date}){text[heading.end() :]}"


def replace_once(path: Path, pattern: str, text: str) -> None:
    content, count = re.subn(pattern, text, path.read_text(encoding="utf-8"), count=1, flags=re.MULTILINE)
    assert count == 1, f"{path} has no {pattern}"
    path.write_text(content, encoding="utf-8")


def widen_dependants(name: str, version: str) -> list[str]:
    """Let the ranges of packages that need `name` admit `version`; return those that changed."""
    major, minor, _ = numbers(version)
    changed = []
    for other in repo.PACKAGES:
        needed = [
            line for line in repo.declared_dependencies(other) if line.startswith(f"{repo.DISTRIBUTIONS[name]}>")
        ]
        line = needed[0] if needed else ""
        bounds = [tuple(map(int, found)) for found in re.findall(r"[><]=?(\d+)\.(\d+)", line)]
        if not bounds or bounds[0] <= (major, minor) < bounds[1]:
            continue
        path = repo.package_folder(other) / "pyproject.toml"
        wanted = f"{repo.DISTRIBUTIONS[name]}>={major}.{minor},<{major}.{minor + 1}"
        path.write_text(path.read_text().replace(f'"{line}"', f'"{wanted}"'))
        changed.append(other)
    return changed


def cut(name: str, version: str, date: str) -> None:
    """Write the version of a package everywhere, date its changelog, and widen the ranges of its dependants."""
    if numbers(version) < numbers(version_of(name)):
        raise ReleaseError(f"{name} {version}: it has version {version_of(name)}, and versions only grow")
    folder = repo.package_folder(name)
    changelog = folder / "CHANGELOG.md"
    changelog.write_text(new_changelog(changelog.read_text(encoding="utf-8"), version, date), encoding="utf-8")
    replace_once(folder / "pyproject.toml", r'^version = "[^"]+"$', f'version = "{version}"')
    replace_once(repo.source_folder(name) / "__init__.py", r'^__version__ = "[^"]+"$', f'__version__ = "{version}"')
    changed = widen_dependants(name, version)
    say(f"{name} is {version}, of {date}; commit it, tag the commit {name}-{version} and push the tag")
    if changed:
        say(f"ranges widened in {', '.join(changed)}: release these, too")


# --- build, judge, smoke, sbom


def run(command: Sequence[str], what: str, cwd: Path = repo.ROOT, environ: dict[str, str] | None = None) -> str:
    """Run a command and return its output.  Raises ReleaseError with the last lines if it fails."""
    done = subprocess.run(
        command, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        tail = "\n".join(f"    {line}" for line in done.stdout.strip().splitlines()[-30:])
        raise ReleaseError(f"{what} failed (exit code {done.returncode})\n{tail}")
    return done.stdout


def tool_environment() -> dict[str, str]:
    """Return variables in which the release tools come first on PATH; install them if they are missing or older."""
    stamp, text = TOOLS / "stamp", REQUIREMENTS.read_text()
    if not stamp.exists() or stamp.read_text() != text:
        shutil.rmtree(TOOLS, ignore_errors=True)
        with devenv.step("installing the release tools into .cache/release"):
            venv.create(TOOLS, with_pip=True)
            run([str(TOOLS / "bin/pip"), "install", "-q", "-r", str(REQUIREMENTS)], "installing the release tools")
        stamp.write_text(text)
    environ = devenv.child_environment()
    return environ | {"VIRTUAL_ENV": str(TOOLS), "PATH": f"{TOOLS / 'bin'}{os.pathsep}{environ['PATH']}"}


def build(names: Sequence[str], target: Path) -> None:
    """Build the source archive and the wheels of each package into `target`."""
    environ = tool_environment()
    target.mkdir(parents=True, exist_ok=True)
    command = [str(TOOLS / "bin/python"), "-m", "build", "--outdir"]
    for name in names:
        for old in target.glob(f"{wheel_stem(name)}-*"):
            old.unlink()
        folder = str(repo.package_folder(name))
        run([*command, str(target), "--sdist", folder], f"building the source archive of {name}", environ=environ)
        (archive,) = target.glob(f"{wheel_stem(name)}-*.tar.gz")
        wheels = ["pure"] if not (repo.package_folder(name) / "hatch_build.py").exists() else ["pure", "compiled"]
        for kind in wheels:
            build_wheel(archive, kind, target, environ)
        say(f"{name}: {', '.join(sorted(path.name for path in target.glob(f'{wheel_stem(name)}-*')))}")


def build_wheel(archive: Path, kind: str, target: Path, environ: dict[str, str]) -> None:
    """Build a wheel from a source archive, so that the archive is known to be complete; tag compiled ones."""
    work = target / f".{kind}"
    shutil.rmtree(work, ignore_errors=True)
    with tarfile.open(archive) as packed:
        packed.extractall(work, filter="data")
    (folder,) = work.iterdir()
    chosen = environ | ({"ZBUILD": "pure"} if kind == "pure" else {})
    python = str(TOOLS / "bin/python")
    run(
        [python, "-m", "build", "--wheel", "--outdir", str(work), str(folder)],
        f"building {archive.name}",
        environ=chosen,
    )
    (wheel,) = work.glob("*.whl")
    if kind == "compiled":
        run(["auditwheel", "repair", "-w", str(target), str(wheel)], f"tagging {wheel.name}", environ=environ)
    else:
        shutil.move(wheel, target / wheel.name)
    shutil.rmtree(work)


def content_problems(path: Path) -> list[str]:
    """Return what a distribution lacks, or has too much: licence, type marker, compiled code, rendered README."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            files = wheel.namelist()
            metadata = next(wheel.read(f).decode() for f in files if f.endswith(".dist-info/METADATA"))
        compiled = any(file.endswith(".so") for file in files)
        found = [] if compiled != path.stem.endswith("-none-any") else ["compiled code and tag do not agree"]
        found += [] if any(file.endswith("/py.typed") for file in files) else ["no py.typed"]
        found += ["a tag of this machine, not of manylinux"] if "-linux_" in path.name else []
    else:
        with tarfile.open(path) as archive:
            files = [name.partition("/")[2] for name in archive.getnames()]
            member = archive.extractfile(next(n for n in archive.getnames() if n.endswith("/PKG-INFO")))
            assert member is not None
            metadata = member.read().decode()
        found = ["compiled code"] if any(file.endswith(".so") for file in files) else []
    found += [] if any(Path(file).name == "LICENSE" for file in files) else ["no LICENSE"]
    found += [f"README: relative link {link}" for link in RELATIVE_LINK.findall(metadata)]
    wanted = ("License-Expression: Apache-2.0", "Author: z* maintainers", "Keywords: ", "Project-URL: Documentation")
    return found + [f"METADATA without {line!r}" for line in wanted if line not in metadata]


def distributions(folder: Path) -> list[Path]:
    found = sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])
    if not found:
        raise ReleaseError(f"{folder} has no distributions: run `tools/release.py build all` first")
    return found


def judge(folder: Path) -> None:
    """Check every distribution by twine, auditwheel and its contents."""
    found, environ = distributions(folder), tool_environment()
    run(["twine", "check", "--strict", *map(str, found)], "twine", environ=environ)
    bad = [f"{path.name}: {problem}" for path in found for problem in content_problems(path)]
    if bad:
        raise ReleaseError("\n".join(["distributions are not sound:", *bad]))
    for path in found:
        platform = "" if path.suffix != ".whl" or path.stem.endswith("-none-any") else audited(path, environ)
        say(f"{path.name:70} {path.stat().st_size / 1000:6.0f} KB  ok{platform}")


def audited(wheel: Path, environ: dict[str, str]) -> str:
    """Return auditwheel's verdict on a compiled wheel; it must be what the file name promises."""
    text = " ".join(run(["auditwheel", "show", str(wheel)], "auditwheel", environ=environ).split())
    found = re.search(r'platform tag: "([^"]+)"', text)
    if found is None or found[1] not in wheel.stem:
        raise ReleaseError(f"{wheel.name}: auditwheel says {found[1] if found else text!r}")
    return f", {found[1]}"


def kind_of(wheel: Path) -> str:
    if not wheel.stem.endswith("-none-any"):
        return "compiled"
    return "pure" if (package_of(wheel) in WARNINGS or package_of(wheel) == "zcomm") else "python"


def package_of(path: Path) -> str:
    return next(name for name in repo.PACKAGES if path.name.startswith(f"{wheel_stem(name)}-"))


def pip_install(folder: Path, what: Sequence[str]) -> None:
    command = [str(folder / "bin/python"), "-m", "pip", "install", "-q", "--no-compile"]
    constraints = ["-c", str(repo.ROOT / "constraints.txt")]
    run([*command, *constraints, *what], f"installing {' '.join(what)}", environ=devenv.child_environment())


def fresh_environment(wheel: Path, folder: Path, others: Sequence[Path]) -> Path:
    """Make an environment of torch, a wheel and, of its siblings, those of `others`; return its interpreter.

    torch, a gigabyte, is installed once; each environment is a copy of hard links to it.
    """
    base = folder.parent.parent / "torch"
    if not base.exists():
        with devenv.step("making an environment with torch"):
            venv.create(base.with_suffix(".new"), with_pip=True)
            pip_install(base.with_suffix(".new"), ["torch"])
            run(
                [str(base.with_suffix(".new") / "bin/python"), "-c", "import torch"], "importing torch"
            )  # compiles it
            base.with_suffix(".new").rename(base)
    shutil.copytree(base, folder, copy_function=os.link, symlinks=True)
    siblings = [path for path in others if package_of(path) in repo.closure([package_of(wheel)])[:-1]]
    pip_install(folder, [str(wheel), *map(str, siblings)])
    return folder / "bin/python"


def smoke(folder: Path, only: Sequence[str], bill: bool) -> None:
    """Use every wheel in an environment of its own, in an empty folder, with no compiler on PATH.

    A wheel that lacks compiled code must say so once, with the reason.  With `bill` the software bill of materials of
    each compiled (or only) wheel is written beside it.
    """
    wheels = [path for path in distributions(folder) if path.suffix == ".whl" and package_of(path) in only]
    plain = [path for path in distributions(folder) if path.suffix == ".whl" and kind_of(path) != "pure"]
    place = TOOLS.parent / "smoke" / "now"
    for wheel in wheels:
        shutil.rmtree(place, ignore_errors=True)
        name, kind = package_of(wheel), kind_of(wheel)
        python = fresh_environment(wheel, place / "venv", plain)
        (place / "empty").mkdir()
        environ = {"PATH": str(place / "empty"), "HOME": str(place), "OMP_NUM_THREADS": "1"}
        said = run([str(python), str(SMOKE), name, kind], wheel.name, place / "empty", environ)
        warned = sum("Warning: " in line and "is not built (" in line for line in said.splitlines())
        wanted = WARNINGS.get(name, 0) if kind == "pure" else 0
        if warned != wanted:
            raise ReleaseError(f"{wheel.name}: warned {warned} times, not {wanted}, that it has no kernels\n{said}")
        say(f"{wheel.name:70} works alone" + (", with one warning" if wanted else ""))
        if bill and kind != "pure":
            write_bill(name, python, folder)
        shutil.rmtree(place)


def write_bill(name: str, python: Path, folder: Path) -> None:
    """Write the CycloneDX list of what an installation of a package brings, with versions and licences."""
    target = folder / f"{wheel_stem(name)}-{version_of(name)}.cdx.json"
    options = ["--output-reproducible", "--pyproject", str(repo.package_folder(name) / "pyproject.toml")]
    command = ["cyclonedx-py", "environment", *options, "-o", str(target), str(python)]
    run(command, f"the bill of materials of {name}", environ=tool_environment())
    target.write_text(json.dumps(without_local_files(json.loads(target.read_text())), indent=2) + "\n")
    say(f"wrote {target.name}")


def without_local_files(bill: Any) -> Any:
    """Return a bill of materials without the places that wheels were installed from on this machine."""
    if isinstance(bill, dict):
        found = {key: without_local_files(value) for key, value in bill.items()}
        if "externalReferences" in found:
            kept = [each for each in found["externalReferences"] if not each["url"].startswith("file:")]
            found["externalReferences"] = kept
        return found
    return [without_local_files(each) for each in bill] if isinstance(bill, list) else bill


def selected(names: Sequence[str]) -> list[str]:
    """Return the packages that are named, leaves first.  Raises ReleaseError for an unknown one."""
    wanted = list(repo.PACKAGES) if not names or list(names) == ["all"] else list(names)
    unknown = sorted(set(wanted) - set(repo.PACKAGES))
    if unknown:
        raise ReleaseError(f"no package {', '.join(unknown)}: choose from {', '.join(repo.PACKAGES)}, or all")
    return [name for name in repo.PACKAGES if name in wanted]


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = result.add_subparsers(dest="verb", required=True)
    for verb in ("check", "build", "smoke", "sbom"):
        sub = verbs.add_parser(verb)
        sub.add_argument("packages", nargs="*", metavar="PKG", help="default: all")
        if verb == "check":
            sub.add_argument("--publish", action="store_true", help="also reject placeholders of addresses")
    verbs.add_parser("judge")
    sub = verbs.add_parser("cut")
    sub.add_argument("package")
    sub.add_argument("version")
    sub.add_argument("--date", default=datetime.date.today().isoformat())
    sub = verbs.add_parser("address")
    sub.add_argument("--source", required=True)
    sub.add_argument("--docs", required=True)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        if options.verb == "check":
            check(selected(options.packages), options.publish)
        elif options.verb == "cut":
            (name,) = selected([options.package])
            cut(name, options.version, options.date)
        elif options.verb == "build":
            build(selected(options.packages), DIST)
        elif options.verb == "judge":
            judge(DIST)
        elif options.verb in ("smoke", "sbom"):
            smoke(DIST, selected(options.packages), bill=options.verb == "sbom")
        else:
            address(options.source, options.docs)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
