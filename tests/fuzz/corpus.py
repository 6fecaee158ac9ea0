#!/usr/bin/env python3
"""The inputs that are kept for the fuzz targets: one archive each, tests/fuzz/corpus/TARGET.tar.gz.

corpus.py unpack TARGET FOLDER      writes its cases to a new folder
corpus.py pack TARGET FOLDER        makes the archive of what is in a folder, and of nothing else
corpus.py add TARGET FILE...        adds cases: under the file's name, or under the first 12 digits of its
                                    SHA-1 where a fuzzer has named it (40 digits)
corpus.py minimise TARGET [FOLDER...]   keeps what reaches code that no other case reaches, of the cases and
                                    of what a fuzzer has left in these folders. A case whose name is no hash
                                    was put there by hand and stays. Needs clang with libFuzzer; for `calls`
                                    it compiles the whole library
corpus.py check                     says whether each archive is as `pack` makes it
"""

import argparse
import gzip
import io
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile

FUZZ = pathlib.Path(__file__).resolve().parent
ROOT = FUZZ.parent.parent
TARGETS = ("calls", "head", "manifest")
KEPT_DIGITS = 12


def archive_of(target):
    return FUZZ / "corpus" / f"{target}.tar.gz"


def read(target):
    """The cases by name."""
    with tarfile.open(archive_of(target)) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive.getmembers()}


def tar_of(cases):
    """An archive of the cases. The same cases give the same bytes: they are sorted, without times and owners."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in sorted(cases.items()):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def write(target, cases):
    if not cases:
        sys.exit(f"error: there is no case for {target}; its archive stays as it is")
    archive_of(target).write_bytes(gzip.compress(tar_of(cases), mtime=0))
    print(f"{archive_of(target).relative_to(ROOT)}: {len(cases)} cases")


def case_name(path):
    return path.name[:KEPT_DIGITS] if re.fullmatch("[0-9a-f]{40}", path.name) else path.name


def cases_in(paths):
    return {case_name(path): path.read_bytes() for path in paths}


def unpack(target, folder):
    pathlib.Path(folder).mkdir(parents=True)
    for name, data in read(target).items():
        pathlib.Path(folder, name).write_bytes(data)


def pack(target, folder):
    write(target, cases_in(pathlib.Path(folder).iterdir()))


def add(target, *files):
    write(target, read(target) | cases_in(map(pathlib.Path, files)))


def minimise(target, *folders):
    with tempfile.TemporaryDirectory() as scratch:
        cases, kept = pathlib.Path(scratch, "cases"), pathlib.Path(scratch, "kept")
        unpack(target, cases)
        kept.mkdir()
        for case in list(cases.iterdir()):
            if not re.fullmatch(f"[0-9a-f]{{{KEPT_DIGITS}}}", case.name):
                case.rename(kept / case.name)
        subprocess.run(["bash", FUZZ / "fuzz_build.sh", ROOT, scratch, target], check=True)
        subprocess.run([f"{scratch}/{target}", "-merge=1", kept, cases, *folders], check=True)
        pack(target, kept)


def check():
    for target in TARGETS:
        with gzip.open(archive_of(target)) as archive:
            if archive.read() != tar_of(read(target)):
                sys.exit(f"FAILED: {archive_of(target).relative_to(ROOT)} has times, owners or another order: "
                         f"make it with tests/fuzz/corpus.py")
    print(f"{len(TARGETS)} archives are as tests/fuzz/corpus.py makes them")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command, name, count in ((unpack, "folder", 1), (pack, "folder", 1), (add, "file", "+"),
                                 (minimise, "folder", "*"), (check, None, None)):
        one = commands.add_parser(command.__name__)
        one.set_defaults(command=command, target=None, names=[])
        if name:
            one.add_argument("target", choices=TARGETS)
            one.add_argument("names", metavar=name.upper(), nargs=count)
    given = parser.parse_args()
    try:
        given.command(*([given.target] if given.target else []), *given.names)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
