"""portable_wheel.py WHEEL FOLDER: write a copy of the wheel that holds the libraries which it takes from the system.

`auditwheel repair` puts them into it, all but libibverbs. Gloo links that for a transport that Ballast does not use, and it
brings libnl, which ends the process at exit where another library, such as MPI, has loaded libnl for all. So the copy holds a
library with the same symbols, each of which ends the process. It also holds the licence of each library, from its package in
Debian. Needs a C compiler, `patchelf`, and Debian or a system that is made from it.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from auditwheel.wheeltools import InWheel

UNUSED = "libibverbs.so.1"


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def libraries_of(wheel: Path, folder: Path) -> list[Path]:
    """Return the libraries that the extension in the wheel would load here."""
    extension = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so"))
    with zipfile.ZipFile(wheel) as files:
        files.extract(extension, folder)
    return [Path(library) for library in re.findall(r"=> (/\S+)", output_of("ldd", folder / extension))]


def write_absent(gloo: Path, folder: Path) -> None:
    """Write a library with the symbols and versions that Gloo takes from the unused one."""
    undefined = output_of("nm", "--dynamic", "--undefined-only", "--with-symbol-versions", gloo)
    symbols = re.findall(r"\bU (ibv_\w+)@(\S+)", undefined)
    versions = {version: [name for name, of in symbols if of == version] for _, version in symbols}
    source, exports = folder / "absent.c", folder / "absent.map"
    source.write_text("".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name, _ in symbols))
    exports.write_text("".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in versions.items()))
    options = [f"-Wl,-soname,{UNUSED}", f"-Wl,--version-script,{exports}", "-o", folder / UNUSED]
    output_of(os.environ.get("CC", "cc"), "-shared", "-fPIC", source, *options)


def name_of(library: Path) -> str:
    """Return the name without versions, and without the digits that auditwheel adds."""
    return re.sub(r"-[0-9a-f]{8}$", "", library.name.partition(".so")[0])


def licence_of(library: Path) -> Path:
    """Return the file in which Debian's package of the library keeps its licence."""
    file = library.resolve()
    for place in (file, Path("/") / file.relative_to("/usr") if file.is_relative_to("/usr") else file):  # /lib may be /usr/lib
        found = subprocess.run(["dpkg-query", "--search", place], capture_output=True, text=True)
        if found.returncode == 0:
            return Path("/usr/share/doc", found.stdout.partition(":")[0], "copyright")
    raise SystemExit(f"portable_wheel.py: {library} is in no package of Debian, so its licence is not known")


def write_with_licences(wheel: Path, folder: Path, libraries: list[Path]) -> None:
    """Write the wheel to the folder, with the licences of those libraries that it holds."""
    folder.mkdir(parents=True, exist_ok=True)
    with InWheel(wheel, folder / wheel.name):
        held = {name_of(library) for library in Path("ballast_train.libs").iterdir()}
        licences = next(Path().glob("*.dist-info")) / "licenses"
        for library in libraries:
            if name_of(library) in held and library.name != UNUSED:
                shutil.copy(licence_of(library), licences / f"{name_of(library)}.txt")


def main() -> None:
    wheel, to = Path(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as temporary:
        folder, environment = Path(temporary), dict(os.environ)
        libraries = libraries_of(wheel, folder)
        gloo = next((library for library in libraries if name_of(library) == "libgloo"), None)
        if gloo and UNUSED in output_of("ldd", gloo):
            write_absent(gloo, folder)
            environment["LD_LIBRARY_PATH"] = os.pathsep.join([temporary, *filter(None, [environment.get("LD_LIBRARY_PATH")])])
        repaired = folder / "repaired"
        repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", repaired, wheel]
        subprocess.run(repair, check=True, env=environment)
        write_with_licences(next(repaired.iterdir()), to, libraries)


if __name__ == "__main__":
    main()
