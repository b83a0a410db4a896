# SPDX-License-Identifier: Apache-2.0
"""Where the driver's own distributions come from, so that another environment gets the very same ones.

A version number is not enough: two working copies carry the same one, and an index may hold a stranger's package of
that name. So an editable installation goes in as the same editable folder, and any other is packed into a wheel again
from the files that its ``RECORD`` lists. Nothing of our own is asked from an index.
"""

import base64
import hashlib
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlparse

from packaging.utils import canonicalize_name

from nemo_rl_core.errors import EnvironmentBuildError

__all__ = ["OwnSource", "own_source", "pack_wheel"]

#: What an installer adds or makes anew; not part of what was built.
_INSTALLERS_OWN = frozenset({"INSTALLER", "RECORD", "REQUESTED", "direct_url.json", "uv_build.json", "uv_cache.json"})


@dataclass(frozen=True, kw_only=True)
class OwnSource:
    """One distribution as this interpreter has it.

    Attributes:
        distribution: Its name.
        version: Its version.
        identity: Hash of what it holds; of an editable one, of its folder's path and its project file, since edits of
            the code reach both environments anyway.
        folder: The project's folder where it is editable, else None.
    """

    distribution: str
    version: str
    identity: str
    folder: Path | None = None


def own_source(distribution: str) -> OwnSource:
    """Find out how a distribution is installed here.

    Raises:
        EnvironmentBuildError: If it is not installed, or its metadata does not say what it holds.
    """
    found = _installed(distribution)
    folder = _editable_folder(found)
    if folder is None:
        lines = [f"{path} {digest}" for path, digest, _ in _files(found)]
        return OwnSource(distribution=found.name, version=found.version, identity=_hash("\n".join(sorted(lines))))
    project = folder / "pyproject.toml"
    if not project.is_file():
        raise EnvironmentBuildError(
            f"{distribution} is installed as an editable project from {folder}, which has no pyproject.toml any more; "
            "install it again from where it is now"
        )
    identity = _hash(f"{folder}\n{project.read_text(encoding='utf-8')}")
    return OwnSource(distribution=found.name, version=found.version, identity=identity, folder=folder)


def pack_wheel(distribution: str, folder: Path) -> Path:
    """Write the wheel of an installed distribution from its installed files, and return its path.

    Console scripts are left out: an installer makes them anew from the entry points. (Format: PEP 427 and the binary
    distribution format of PyPA.)

    Args:
        distribution: Name of a distribution that is not editable.
        folder: Where the wheel goes.

    Raises:
        EnvironmentBuildError: If it is not installed, or files of it are missing.
    """
    found = _installed(distribution)
    tags = [
        line.partition(":")[2].strip() for line in (found.read_text("WHEEL") or "").splitlines() if line[:4] == "Tag:"
    ]
    stem = f"{canonicalize_name(found.name).replace('-', '_')}-{found.version}"
    path = folder / f"{stem}-{_tag(tags)}.whl"
    rows = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, _, file in _files(found):
            try:
                content = file.read_bytes()
            except OSError as error:
                raise EnvironmentBuildError(
                    f"{distribution} {found.version} lists {name}, which cannot be read: {error}; reinstall it"
                ) from error
            wheel.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            rows.append(f"{name},sha256={digest},{len(content)}")
        info = next(PurePosixPath(row.partition(",")[0]).parts[0] for row in rows if ".dist-info/METADATA" in row)
        wheel.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,", ""]))
    return path


def _tag(tags: list[str]) -> str:
    """Return the compressed tag set of a wheel's file name, e.g. ``py2.py3-none-any``."""
    parts = zip(*(tag.split("-") for tag in tags or ["py3-none-any"]), strict=True)
    return "-".join(".".join(dict.fromkeys(part)) for part in parts)


def _installed(distribution: str) -> metadata.Distribution:
    try:
        return metadata.distribution(distribution)
    except metadata.PackageNotFoundError as error:
        raise EnvironmentBuildError(
            f"the environment takes {distribution} from this interpreter, which does not have it; install it here first"
        ) from error


def _editable_folder(found: metadata.Distribution) -> Path | None:
    """Return the folder of an editable installation (PEP 610)."""
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(origin["url"]).path))


def _files(found: metadata.Distribution) -> Iterator[tuple[str, str, Path]]:
    """Yield name, recorded digest and path of each file that belongs into a wheel."""
    if not found.files:
        raise EnvironmentBuildError(
            f"{found.name} {found.version} has no list of its files (RECORD), so it cannot be packed for another "
            "environment; reinstall it with pip or uv"
        )
    for file in sorted(found.files):
        inside = ".." not in file.parts and not file.is_absolute() and "__pycache__" not in file.parts
        own = file.parts[0].endswith(".dist-info") and file.name in _INSTALLERS_OWN
        if inside and not own:
            yield file.as_posix(), file.hash.value if file.hash else "", Path(str(file.locate()))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
