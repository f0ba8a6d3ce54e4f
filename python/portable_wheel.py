"""portable_wheel.py WHEEL FOLDER: write a copy of the wheel that holds the libraries which it takes from the system.

`auditwheel repair` puts them into it, all but libibverbs. Gloo links that for a transport that Ballast does not use, and it
brings libnl, which ends the process at exit where another library, such as MPI, has loaded libnl for all. So the copy holds a
library with the same symbols, each of which ends the process. Needs a C compiler and `patchelf`.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

UNUSED = "libibverbs.so.1"


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def find_gloo(wheel: Path, folder: Path) -> Path | None:
    """Return the Gloo that the extension in the wheel would load; None for one that is built without it."""
    extension = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so"))
    with zipfile.ZipFile(wheel) as files:
        files.extract(extension, folder)
    found = re.search(r"libgloo\S* => (\S+)", output_of("ldd", folder / extension))
    return Path(found[1]) if found else None


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


def main() -> None:
    wheel, to = Path(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as temporary:
        folder, environment = Path(temporary), dict(os.environ)
        gloo = find_gloo(wheel, folder)
        if gloo and UNUSED in output_of("ldd", gloo):
            write_absent(gloo, folder)
            environment["LD_LIBRARY_PATH"] = os.pathsep.join([temporary, *filter(None, [environment.get("LD_LIBRARY_PATH")])])
        subprocess.run([sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", to, wheel], check=True, env=environment)


if __name__ == "__main__":
    main()
