#!/bin/sh
# Writes book.txt, the text of the measurements with SmolLM2, in the folder where it runs: 420,000 bytes from the middle of
# Jane Austen's "Emma", a paragraph a line.
#
# The novel comes out of Debian's package r-cran-janeaustenr 1.0.0-1. OASIS_AUSTEN_DEB may name the package where it was
# downloaded before; otherwise apt-get downloads it. Nothing is installed. Package and text are checked against their sha256;
# a complete file is left alone.
set -eu

deb_sha256=df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95
book_sha256=3a58cfc5c631a3a0038e390f20dcbc55cccfb9b9ddae0798f0472371f3483032
package=r-cran-janeaustenr=1.0.0-1

fail() {
    echo "fetch-book: $1" >&2
    exit 1
}

# check FILE SHA256 HINT
check() {
    found=$(sha256sum "$1" | cut -d ' ' -f 1)
    [ "$found" = "$2" ] || fail "$1: expected sha256 $2, found $found (hint: $3)"
}

command -v python3 >/dev/null || fail "python3: expected on the PATH, found nothing (hint: install Python 3.8 or newer)"
if [ -f book.txt ] && [ "$(sha256sum book.txt | cut -d ' ' -f 1)" = "$book_sha256" ]; then
    echo "fetch-book: book.txt is there and complete"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

if [ -n "${OASIS_AUSTEN_DEB:-}" ]; then
    deb=$OASIS_AUSTEN_DEB
    [ -f "$deb" ] || fail "OASIS_AUSTEN_DEB: expected a package, found nothing at $deb (hint: unset it to download)"
else
    (cd "$work" && apt-get download "$package" >/dev/null) ||
        fail "apt-get download $package: expected the package, found the error above (hint: download it elsewhere and set OASIS_AUSTEN_DEB)"
    deb=$work/r-cran-janeaustenr_1.0.0-1_all.deb
fi
check "$deb" "$deb_sha256" "the download is damaged or another version: fetch it again"

python3 - "$deb" "$work/book.txt" <<'PYTHON' || fail "unpacking $deb: expected the novels, found the error above (hint: is the disk full?)"
import gzip, io, re, struct, sys, tarfile, zlib

def members(deb):
    """Name and bytes of each file of an ar archive."""
    at = 8
    while at + 60 <= len(deb):
        name, size = deb[at:at + 16].decode().strip().rstrip("/"), int(deb[at + 48:at + 58])
        yield name, deb[at + 60:at + 60 + size]
        at += 60 + size + size % 2

def strings(data):
    """An R character vector, serialised as big-endian XDR."""
    version, = struct.unpack_from(">i", data, 2)
    at = 14
    if version == 3:  # the name of the encoding
        at += 4 + struct.unpack_from(">i", data, at)[0]
    flags, count = struct.unpack_from(">ii", data, at)
    assert flags & 0xFF == 16, "expected a character vector"
    at += 8
    for _ in range(count):
        _, length = struct.unpack_from(">ii", data, at)
        yield data[at + 8:at + 8 + max(length, 0)].decode("utf-8", "replace")
        at += 8 + max(length, 0)

def paragraphs(lines):
    """Lines joined up to an empty one; no headings."""
    heading = re.compile(r"(CHAPTER|VOLUME|Chapter|FINIS|THE END|PERSUASION|by Jane).{0,30}")
    for paragraph in "\n".join(line.strip() for line in lines).split("\n\n"):
        text = " ".join(paragraph.split("\n")).strip()
        if len(text) <= 20 or heading.fullmatch(text):
            continue
        text = text.translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2014: "--", 0x2013: "-", ord("_"): None})
        text = re.sub(r"[{}<>\[\]|*]", "", text).encode("ascii", "ignore").decode()
        text = " ".join(text.split())
        if len(text) > 20:
            yield text + "\n"

with open(sys.argv[1], "rb") as file:
    archive = dict(members(file.read()))
name = next(name for name in archive if name.startswith("data.tar"))
with tarfile.open(fileobj=io.BytesIO(archive[name])) as tar:
    folder = "./usr/lib/R/site-library/janeaustenr/data/"
    index, novels = (tar.extractfile(folder + part).read() for part in ("Rdata.rdx", "Rdata.rdb"))
# The index has offset and length of every novel as a vector of two integers, Emma's first.
place = re.search(rb"\0\0\0\x0d\0\0\0\x02(.{8})", gzip.decompress(index), re.S)
offset, length = struct.unpack(">ii", place.group(1))
# Four bytes before the data say how long it is.
emma = "".join(paragraphs(strings(zlib.decompress(novels[offset + 4:offset + length]))))
with open(sys.argv[2], "w", newline="") as file:
    file.write(emma[300_000:720_000])
PYTHON
check "$work/book.txt" "$book_sha256" "this Python reads the package in another way: please report it"
mv -f "$work/book.txt" book.txt
echo "fetch-book: book.txt"
